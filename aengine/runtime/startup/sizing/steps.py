"""Chooses the most tokens of a step, and the most prompt tokens of a step that also decodes."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.step_plan import ImageCost, MixedLimit

CPU_STEP_TOKENS = 512  # a longer chunk would make running streams wait too long
STEP_TOKENS = 8192
LONG_STEP_TOKENS = 16384
STEP_FLOP = 1.4e14  # about 0.2 s on an H100 or H200: 8192 tokens of an 8B model
MIXED_STEP_FLOP = 5.1e13  # about 75 ms on an H100 or H200, which have 132 multiprocessors
MIXED_MULTIPLE = 128  # tokens; the tile of matrix products and the distance of prefill graphs
SLOWER_ATTENTION = 2.0  # a multiply-add of a tower's attention takes so much longer than one of a product
# Work of a multiprocessor's tensor cores in one cycle, relative to an H100, by major compute capability.
TENSOR_SPEED = {9: 1.0, 10: 2.0}


def step_tokens(config: EngineConfig, default: int) -> int:
    """Return the most tokens in one step. Raises: ConfigError if a step could not hold all running sequences."""
    tokens = config.max_step_tokens or max(default, config.max_num_seqs)
    if tokens < config.max_num_seqs:  # cannot happen by default
        raise ConfigError(
            f"max_step_tokens: {tokens} is below max_num_seqs ({config.max_num_seqs}), so that a step "
            f"could not hold every running sequence; raise it or lower max_num_seqs"
        )
    return tokens


def mixed_limit(config: EngineConfig, model: ModelConfig, default: int) -> MixedLimit:
    """Return the limit of prompt tokens in a step that also decodes: the configured one, or `default`."""
    # Multiply-adds of one token in the layers' products, and with one key in attention.
    products = model.active_parameters - model.end_parameters
    attention = sum(2 * paging.queries for paging in model.attending)
    return MixedLimit(config.max_mixed_tokens or default, products / attention, MIXED_MULTIPLE)


def image_cost(model: ModelConfig) -> ImageCost | None:
    """Return what the tower's work costs, from the numbers of multiply-adds. None: the model has no tower.

    Every rank computes the whole tower, but only its part of the layers.
    """
    if (spec := model.tower) is None:
        return None
    text = (model.active_parameters - model.end_parameters) / model.ranks
    tower, patches = spec.tower, spec.merge**2
    attention = 2 * tower.layers * tower.hidden * patches**2
    return ImageCost(tower.weights * patches / text, SLOWER_ATTENTION * attention / text, tower.layers)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Limits of the tokens in one step."""

    most: int  # tokens
    mixed: MixedLimit  # of prompt tokens, if the step also decodes

    @classmethod
    def from_config(
        cls, config: EngineConfig, model: ModelConfig, capability: tuple[int, int], processors: int
    ) -> StepSizes:
        """Choose sizes for a CUDA device of this compute capability and number of multiprocessors."""
        parameters, speed = model.active_parameters // model.ranks, device_speed(capability, processors)
        most = step_tokens(config, default_step_tokens(parameters, speed))
        return cls(most, mixed_limit(config, model, default_mixed_tokens(parameters, most, speed)))


def default_step_tokens(parameters: int, speed: float) -> int:
    """Return the default of the most tokens in one step. A larger step takes less time per token but delays others."""
    return LONG_STEP_TOKENS if 2 * parameters * LONG_STEP_TOKENS <= speed * STEP_FLOP else STEP_TOKENS


def default_mixed_tokens(parameters: int, max_step_tokens: int, speed: float) -> int:
    """Return the prompt tokens that take about as long as a stream may wait. speed: as `device_speed` returns it."""
    tokens = int(speed * MIXED_STEP_FLOP / (2 * parameters)) // MIXED_MULTIPLE * MIXED_MULTIPLE
    return min(max(tokens, MIXED_MULTIPLE), max_step_tokens)


def device_speed(capability: tuple[int, int], processors: int) -> float:
    """Return the speed of 16-bit matrix products relative to an H100, from data sheets and without clock rates."""
    each = 0.5 if capability == (8, 0) else TENSOR_SPEED.get(capability[0], 0.25)
    return each * processors / 132
