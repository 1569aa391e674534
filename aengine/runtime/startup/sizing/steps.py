"""How many tokens one step may carry, alone and beside decodes."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.step_plan import MixedLimit

CPU_STEP_TOKENS = 512  # a chunk of a long prompt takes about as long as a stream tolerates waiting
STEP_TOKENS = 8192
LONG_STEP_TOKENS = 16384
STEP_FLOP = 1.4e14  # 0.2 s or so on an H100 or H200: 8192 tokens of an 8B model
MIXED_STEP_FLOP = 5.1e13  # 75 ms or so on an H100 or H200, which have 132 multiprocessors
MIXED_MULTIPLE = 128  # tokens: matrix products come in such tiles, and prefill graphs in such steps
# What a multiprocessor's tensor cores do in a cycle, an H100's being 1: by the first digit of the compute capability.
TENSOR_SPEED = {9: 1.0, 10: 2.0}


def step_tokens(config: EngineConfig, default: int) -> int:
    """The most tokens in one step. Raises `ConfigError` if a step could not carry every running sequence."""
    tokens = config.max_step_tokens or max(default, config.max_num_seqs)
    if tokens < config.max_num_seqs:  # never by default
        raise ConfigError(
            f"max_step_tokens: {tokens} is below max_num_seqs ({config.max_num_seqs}), so that a step "
            f"could not carry every running sequence; raise it or lower max_num_seqs"
        )
    return tokens


def mixed_limit(config: EngineConfig, model: ModelConfig, default: int) -> MixedLimit:
    """How many prompt tokens go beside decodes: as many as configured, or `default`."""
    # Multiply-adds of one token in the layers' products, and with one key in attention.
    products = model.active_parameters - model.end_parameters
    attention = sum(2 * paging.queries for paging in model.attending)
    return MixedLimit(config.max_mixed_tokens or default, products / attention, MIXED_MULTIPLE)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """most: tokens in one step; mixed: of prompts beside decodes."""

    most: int
    mixed: MixedLimit

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, capability: tuple[int, int], processors: int) -> StepSizes:
        """What suits a CUDA device of this compute capability, with so many multiprocessors."""
        parameters, speed = model.active_parameters // model.ranks, device_speed(capability, processors)
        most = step_tokens(config, default_step_tokens(parameters, speed))
        return cls(most, mixed_limit(config, model, default_mixed_tokens(parameters, most, speed)))


def default_step_tokens(parameters: int, speed: float) -> int:
    """Prompt tokens in one step: larger products are faster ones, but who comes next waits for them."""
    return LONG_STEP_TOKENS if 2 * parameters * LONG_STEP_TOKENS <= speed * STEP_FLOP else STEP_TOKENS


def default_mixed_tokens(parameters: int, max_step_tokens: int, speed: float) -> int:
    """Prompt tokens that take about as long as a stream should wait, in whole multiples. speed: as `device_speed`."""
    tokens = int(speed * MIXED_STEP_FLOP / (2 * parameters)) // MIXED_MULTIPLE * MIXED_MULTIPLE
    return min(max(tokens, MIXED_MULTIPLE), max_step_tokens)


def device_speed(capability: tuple[int, int], processors: int) -> float:
    """How fast the device multiplies 16-bit matrices, an H100 being 1: a guess from data sheets, clocks aside."""
    each = 0.5 if capability == (8, 0) else TENSOR_SPEED.get(capability[0], 0.25)
    return each * processors / 132
