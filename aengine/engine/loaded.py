"""The parts of an engine whose model is loaded, and the sequences made of its requests."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from aengine.cache.radix import Namespace, packed
from aengine.cache.tiers.disk import DiskPages
from aengine.config import EngineConfig
from aengine.engine.adapters import Adapters
from aengine.engine.requests.live import begin, make_sibling
from aengine.engine.tiers import PageCarriers, open_disk, tiers_below
from aengine.engine.without_collections import without_collections
from aengine.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelNotFoundError
from aengine.model.fields import Fields, read_json_object
from aengine.model.loading.fingerprint import fingerprint_of
from aengine.model.loading.hub import resolve_adapter, resolve_model
from aengine.requests.sampling_params import SamplingParams, check_token_ids
from aengine.runtime.driver import open_contexts
from aengine.runtime.preload import link_torch
from aengine.scheduling.addons.snapshots import SequenceSnapshots
from aengine.scheduling.addons.windows import SequenceWindows
from aengine.scheduling.holding import Holding
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import LoadedAdapter
from aengine.scheduling.sequence import Sequence as TokenSequence
from aengine.step_plan import Pool
from aengine.text.grammar.grammars import Grammars, Matcher, check_library
from aengine.text.grammar.source import GrammarLimits
from aengine.text.tokens.tokenizer import Tokenizer
from aengine.timeline import Timeline

if TYPE_CHECKING:  # torch, which `load` imports
    from aengine.engine.pooling.scorer import Scorer
    from aengine.model.config import ModelConfig
    from aengine.model.loading.generation import GenerationDefaults
    from aengine.model.loading.pooling import PoolingConfig
    from aengine.runtime.startup.ready import Runtime
    from aengine.runtime.startup.sizing.pool import PoolSize
    from aengine.runtime.startup.start import Start

log = logging.getLogger("aengine")

_UNKNOWN_HOST = 16 * 2**30  # bytes of memory that a machine is taken to have which does not say
_NOTHING_DRAWN = SamplingParams()  # of prompts that are pooled
SWITCH_SECONDS = 0.0005  # after which a thread that waits for the interpreter gets it


class Loaded:
    """A loaded model: the runtime with its tokenizer, grammars and scheduler, and the checkpoint's defaults."""

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        tokenizer: Tokenizer,
        grammars: Grammars,
        generation: GenerationDefaults,
        pooling: PoolingConfig,
        scorer: Scorer | None,
        timeline: Timeline | None,
        adapters: Adapters | None,
        disk: DiskPages | None,
        fingerprint: bytes,
    ) -> None:
        """fingerprint: of the model, and of all that its keys and values depend on."""
        self._config = config
        self._near_positions = runtime.model.near_positions
        self.runtime = runtime
        self.tokenizer = tokenizer
        self.generation = generation
        self.pooling = pooling
        self.scorer = scorer  # None: pairs are scored by their embeddings
        self.timeline = timeline
        self.grammars = grammars
        self.adapters = adapters  # None: there is room for none
        self.default_params = replace(SamplingParams(), **generation.sampling)
        self.scheduler = Scheduler(
            num_pages=runtime.pool.num_pages,
            page_size=config.page_size,
            max_rows=config.max_num_seqs,
            max_step_tokens=runtime.max_step_tokens,
            mixed_limit=runtime.mixed_limit,
            max_queue=config.max_queue,
            prefix_cache=config.prefix_cache,
            on_begin=begin,
            make_sibling=make_sibling,
            waiting=None if adapters is None else adapters.queue,
            holdings=_holdings(config, runtime.pool),
        )
        self.carriers = None  # nothing lies below the pool
        if runtime.copies is not None:
            tiers = tiers_below(self.scheduler.memory, runtime.copies, fingerprint, disk)
            self.carriers = PageCarriers(self.scheduler.attach(tiers), runtime.copies)

    def reloaded(self, folder: Path) -> None:
        """The weights are those of this folder from here on."""
        if self.carriers is not None and self.carriers.tiers.disk is not None:
            self.carriers.tiers.fingerprint = _fingerprint(folder, self._config, self.runtime)
        if self.runtime.adapters is not None:
            self.runtime.adapters.rebase(folder)

    def look(self) -> None:
        """Between two steps: let those who carry adapters and pages know of what is awaited."""
        if self.adapters is not None:
            self.adapters.look()
        if self.carriers is not None:
            self.carriers.look()

    def adapter(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of that name, None for None. Raises `ModelNotFoundError`."""
        if name is None:
            return None
        if self.adapters is None:
            raise ModelNotFoundError(f"the adapter {name[:200]!r} is not loaded, and there is no room for adapters")
        return self.adapters.named(name)

    async def grammar(self, params: SamplingParams) -> Matcher | None:
        """A matcher at the start of the parameters' grammar, if they have one."""
        return None if params.structured is None else await self.grammars.matcher(params.structured)

    def sequence(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        grammar: Matcher | None,
        banned: tuple[tuple[int, ...], ...],
        rank: tuple[float, int],
        salt: str | None,
        adapter: LoadedAdapter | None,
    ) -> TokenSequence:
        """A request's first choice, from which the others fork.

        Raises `InvalidRequestError`, or `ContextLengthError` where the request does not fit the context.
        """
        if self.runtime.model.head != "vocabulary":
            raise InvalidRequestError(
                "the model has no output matrix and generates nothing: it gives embeddings, scores or classes", "model"
            )
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        max_total = self._max_total(len(token_ids), params)  # first: a million ids take a while to look at
        check_token_ids(token_ids, self.runtime.model.vocab_size, "prompt")
        near = self._is_near(max_total)
        ends = grammar is not None or not params.ignore_eos  # a grammar says itself where the output ends
        return TokenSequence(
            prompt=packed(token_ids),
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            stop_ids=(self.generation.eos_token_ids if ends else ()) + params.stop_token_ids,
            max_total=max_total,
            rank=rank,
            salt=_salt(salt, adapter, near),
            adapter=adapter,
            near=near,
            banned=banned,
            siblings=params.n - 1,
        )

    def pooled_sequence(
        self,
        token_ids: list[int],
        pool: Pool,
        *,
        rank: tuple[float, int],
        salt: str | None,
        adapter: LoadedAdapter | None,
    ) -> TokenSequence:
        """A prompt that is pooled. Raises as `sequence` does."""
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        context = self.runtime.pool.max_model_len
        if len(token_ids) > context:
            raise ContextLengthError(f"{_maximum(context)} However, {len(token_ids)} tokens are given", "prompt")
        check_token_ids(token_ids, self.runtime.model.vocab_size, "prompt")
        near = self._is_near(len(token_ids))
        return TokenSequence(
            prompt=packed(token_ids),
            params=_NOTHING_DRAWN,
            seed=0,
            stop_ids=(),
            max_total=len(token_ids) + 1,  # what is taken of it counts as a draw
            rank=rank,
            salt=_salt(salt, adapter, near),
            adapter=adapter,
            near=near,
            pool=pool,
        )

    def _is_near(self, max_total: int) -> bool:
        """Return whether a sequence of at most so many tokens stays in the trained context.

        True for models that rotate all sequences alike.
        """
        return not self._near_positions or max_total <= self._near_positions

    def _max_total(self, prompt_len: int, params: SamplingParams) -> int:
        context = self.runtime.pool.max_model_len
        if prompt_len >= context:
            raise ContextLengthError(
                f"{_maximum(context)} However, {prompt_len} tokens are given as prompt, and at least one must be left",
                "prompt",
            )
        if params.max_tokens is None:
            return context
        if prompt_len + params.max_tokens > context:
            raise ContextLengthError(
                f"{_maximum(context)} However, {prompt_len} tokens are given as prompt and max_tokens is "
                f"{params.max_tokens}, together {prompt_len + params.max_tokens}",
                "max_tokens",
            )
        return prompt_len + params.max_tokens


def _salt(salt: str | None, adapter: LoadedAdapter | None, near: bool) -> Namespace:
    """Return what separates cached prefixes: the request's salt, its adapter, and how its keys are rotated."""
    if near and adapter is None:
        return salt
    number = 0 if adapter is None else adapter.generation
    return (number if near else -number, salt)


def _holdings(config: EngineConfig, pool: PoolSize) -> list[Holding]:
    """Return the kinds of memory that the model's layers keep in addition to pages."""
    holdings: list[Holding] = []
    if pool.windows is not None:
        holdings.append(SequenceWindows(pool.windows, config.page_size))
    if pool.states is not None:
        holdings.append(SequenceSnapshots(pool.states.snapshots, config.max_num_seqs, config.page_size))
    return holdings


def _maximum(context: int) -> str:
    """The beginning of context errors in OpenAI's own words, by which clients know that they have to shorten a
    conversation.
    """
    return f"This model's maximum context length is {context} tokens."


def load(config: EngineConfig, start: Start | None = None) -> Loaded:
    """Load what the config asks for; blocks for as long as that takes. start: makes the runtime; None: `start_runtime`.

    What is cheap to check comes first: the grammar library and the tokenizer before torch is imported, which takes
    longer than both. Beside all of that torch's libraries are linked and the device's context is opened; grammars are
    made before weights are read.
    """
    folder = resolve_model(config.model, config.revision)
    disk = open_disk(config)
    with without_collections(), _quick_switches(), ThreadPoolExecutor(1, "aengine-text") as beside:
        gpus = 1 if config.tensor_parallel_size == "auto" else config.tensor_parallel_size
        check_library()
        beside.submit(link_torch)  # first: whoever else would link something waits for it
        opening = beside.submit(open_contexts, config.device, gpus)
        tokenizer = _load_tokenizer(config, folder)
        from aengine.engine.pooling.scorer import scorer_of
        from aengine.model.loading.generation import GenerationDefaults
        from aengine.model.loading.pooling import PoolingConfig
        from aengine.runtime.startup.start import start_runtime

        model = described_model(config, folder)
        pooling = PoolingConfig.from_folder(folder, model)
        if config.matryoshka and pooling.dimensions is None:
            pooling = replace(pooling, dimensions=())
        scorer = scorer_of(config.rerank_template, config.model or "", tokenizer, model, pooling)
        # Of the demo model's tokenizer, which stands in for a missing one, nothing is known of where this model ends.
        eos = tokenizer.eos_token_id if (folder / "tokenizer.json").exists() else None
        generation = GenerationDefaults.from_folder(folder, model, eos)
        opening.result()
        limits = GrammarLimits(config.grammar_characters, config.grammar_nesting, config.grammar_seconds)
        making = beside.submit(Grammars, tokenizer, model.vocab_size, generation.eos_token_ids, limits)
        try:
            timeline = None if config.timeline is None else Timeline(config.timeline)
            # The room for adapters depends on those that are named.
            here = {name: str(resolve_adapter(path)) for name, path in config.lora.items()}
            runtime = (start or start_runtime)(replace(config, lora=here), folder, model, making.result)
            try:
                if runtime.pool.max_model_len > (near := model.near_positions) > 0:
                    log.info(
                        "longrope: requests whose prompt and max_tokens fit into %d tokens take the short factors, as "
                        "in transformers; all others take the long ones, from their first token on", near,
                    )  # fmt: skip
                adapters = _read_adapters(config, runtime)
                grammars = making.result()
                if timeline is not None:
                    runtime.runner.trace(timeline)
                return Loaded(
                    config,
                    runtime,
                    tokenizer,
                    grammars,
                    generation,
                    pooling,
                    scorer,
                    timeline,
                    adapters,
                    disk,
                    b"" if disk is None else _fingerprint(folder, config, runtime),
                )
            except BaseException:
                if runtime.adapters is not None:
                    runtime.adapters.close()
                runtime.close()
                raise
        except BaseException:
            if making.exception() is None:
                making.result().close()
            raise


def _fingerprint(folder: Path, config: EngineConfig, runtime: Runtime) -> bytes:
    weights = b"" if runtime.weights is None else runtime.weights.digest
    return fingerprint_of(folder, config, runtime.model, weights, runtime.dtypes)


def described_model(config: EngineConfig, folder: Path) -> ModelConfig:
    """The model in `folder`, as the knobs have it loaded. Raises `CheckpointError` and `ConfigError`."""
    from aengine.model.config import ModelConfig
    from aengine.model.loading.pooling import without_head

    model = ModelConfig.from_folder(folder)
    if config.load_format == "auto":
        model = without_head(folder, model)
    if config.unpacked_copies:
        model = model.with_unpacked_copies()
    return model if config.quantization == "auto" else model.quantized_as(config.quantization)


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Threads that hold the interpreter for microseconds at a time do not wait 5 ms for each of them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _read_adapters(config: EngineConfig, runtime: Runtime) -> Adapters | None:
    """The adapters that the config names, where there is room for any. Raises `AdapterError` and `ConfigError`."""
    if runtime.adapters is None:
        return None
    from aengine.runtime.device import host_memory

    host_bytes = (host_memory() or _UNKNOWN_HOST) // 4
    if config.lora_host_gib is not None:
        host_bytes = int(config.lora_host_gib * 2**30)
    adapters = Adapters(runtime.adapters, host_bytes, set(config.model_names))
    for name, path in config.lora.items():
        try:
            adapters.add(name, path, adapters.read(path))
        except InvalidRequestError as error:
            raise ConfigError(f"lora: {name}={path}: {error}") from None
    return adapters


def _load_tokenizer(config: EngineConfig, folder: Path) -> Tokenizer:
    if config.load_format == "dummy" and not (folder / "tokenizer.json").exists():
        log.warning("%s has no tokenizer.json: text goes through the demo model's tokenizer", folder)
        return Tokenizer.load(resolve_model(None, None), chat_template=config.chat_template)
    path = folder / "config.json"
    fields = Fields(read_json_object(path), str(path))
    # Where it is missing, `ModelConfig` has more to say about the file.
    vocab_size = fields.vocab_size if fields.present("vocab_size") else None
    return Tokenizer.load(folder, vocab_size, config.chat_template)
