"""Loads a model with its tokenizer, grammars, scheduler and runtime."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
from msgspec.structs import replace

from aengine.cache.tiers.disk import DiskPages
from aengine.config import EngineConfig
from aengine.config.speculation import read_speculation
from aengine.engine.addons.adapters import Adapters
from aengine.engine.addons.tiers import TierTasks, make_tiers, open_disk
from aengine.engine.interpreter import QuickSwitches, without_collections
from aengine.engine.requests.live import begin, make_sibling
from aengine.engine.requests.sequences import Sequences
from aengine.errors import CheckpointError, ConfigError, InvalidRequestError, ModelNotFoundError
from aengine.latency import Latencies
from aengine.model.fields import Fields, read_json_object
from aengine.model.loading.fingerprint import fingerprint_of
from aengine.model.loading.hub import resolve_adapter, resolve_model
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.preload import link_torch, open_contexts
from aengine.scheduling.addons.snapshots import SequenceSnapshots
from aengine.scheduling.addons.windows import SequenceWindows
from aengine.scheduling.batch import Counters
from aengine.scheduling.holding import Holding
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import LoadedAdapter
from aengine.step_plan import StepPlan
from aengine.text.grammar.grammars import Grammars, Matcher, check_library
from aengine.text.grammar.source import GrammarLimits
from aengine.text.tokens.tokenizer import Tokenizer, warm_up_library
from aengine.timeline import Timeline
from aengine.types import Stats

if TYPE_CHECKING:  # torch, which `load` imports
    from aengine.engine.pooling.scores import Scorer
    from aengine.engine.requests.image_reading import ImageReading  # Pillow
    from aengine.model.config import ModelConfig
    from aengine.model.loading.generation import GenerationDefaults
    from aengine.model.loading.pooling import PoolingConfig
    from aengine.runtime.startup.ready import Runtime
    from aengine.runtime.startup.sizing.pool import PoolSize
    from aengine.runtime.startup.start import Start

log = logging.getLogger("aengine")

_UNKNOWN_HOST = 16 * 2**30  # bytes of memory to assume if the system does not report them


class Loaded:
    """A loaded model: the runtime with its tokenizer, grammars and scheduler, and the checkpoint's defaults.

    It owns all of them. `close` closes them.
    """

    def __init__(
        self,
        config: EngineConfig,
        latencies: Latencies,
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
        images: ImageReading | str,
    ) -> None:
        """Args:
        latencies: of the engine.
        fingerprint: a digest of everything that keys and values depend on: weights, configuration, dtypes.
        images: reads images. A text: why the model takes none.
        """
        self._config = config
        self.latencies = latencies
        self.runtime = runtime
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.scorer = scorer  # None: pairs are scored by their embeddings
        self.timeline = timeline
        self.grammars = grammars
        self.adapters = adapters  # None: there is no memory for adapters
        self.images = None if isinstance(images, str) else images
        self.no_images = images if isinstance(images, str) else ""
        self.default_params = replace(SamplingParams(), **generation.sampling)
        self.max_model_len = runtime.pool.max_model_len
        self.sequences = Sequences(runtime.model, self.max_model_len, generation.eos_token_ids)
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
            holdings=_holdings(config, runtime.pool, runtime.speculation.most_drafts),
            most_drafts=runtime.speculation.most_drafts,
            image_cost=runtime.image_cost,
            step_cost=runtime.speculation.cost,
            counters=Counters(step_tokens=latencies.step_tokens),
        )
        self.tier_tasks: TierTasks | None = None  # None: there are no tiers below the pool
        if runtime.copies is not None:
            tiers = make_tiers(self.scheduler.memory, runtime.copies, fingerprint, disk)
            self.tier_tasks = TierTasks(self.scheduler.attach(tiers), runtime.copies)
        # The tasks that copy to and from the device.
        self._copying = [task for task in (adapters, self.tier_tasks) if task is not None]
        self.observers: list[Callable[[StepPlan, float], None]] = []  # called with committed steps and their seconds
        if runtime.speculation.most_drafts:
            self.observers.append(self.scheduler.observe_time)
        if self.tier_tasks is not None:
            self.observers.append(self.tier_tasks.observe)

    def adapter(self, name: str | None) -> LoadedAdapter | None:
        """Return the adapter with this name, or None if `name` is None. Raises `ModelNotFoundError`."""
        if name is None:
            return None
        if self.adapters is None:
            raise ModelNotFoundError(f"the adapter {name[:200]!r} is not loaded, and there is no room for adapters")
        return self.adapters.named(name)

    async def grammar(self, params: SamplingParams) -> Matcher | None:
        """Return a matcher at the start of the parameters' grammar, if they have one."""
        return None if params.structured is None else await self.grammars.matcher(params.structured)

    def stats(self, ended_requests: int, last_step: float | None) -> Stats:
        """Return the statistics of the scheduler, of the KV pool and of all other memory of sequences.

        last_step: monotonic time, in seconds, at which the newest step was committed.
        """
        scheduler = self.scheduler
        memory, counters = scheduler.memory, scheduler.counters
        cached = memory.tree.evictable_pages
        stats = Stats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            pages_total=memory.usable_pages,
            pages_used=memory.usable_pages - memory.allocator.free - cached,
            pages_cached=cached,
            pages_free=memory.allocator.free,
            page_size=memory.page_size,
            steps=counters.steps,
            requests=ended_requests,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            cached_host_tokens=counters.cached_host_tokens,
            cached_disk_tokens=counters.cached_disk_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            speculation=self.runtime.speculation.name,
            drafted_tokens=counters.drafted,
            accepted_tokens=counters.accepted,
            verified_rows=counters.verified,
            accepted_by_position=tuple(counters.accepted_by_position),
            last_step_age=None if last_step is None else time.monotonic() - last_step,
        )
        figures: dict[str, int] = {}
        for holding in memory.holdings:
            figures |= holding.figures()
        if self.adapters is not None:
            figures |= self.adapters.queue.figures()
        if self.tier_tasks is not None:
            figures |= self.tier_tasks.tiers.figures()
        return replace(stats, **figures)

    # ---- between the steps ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Wake the tasks that copy adapters and pages, if the scheduler waits for copies. Called between steps."""
        for task in self._copying:
            task.poll()

    async def pause(self) -> None:
        """Start no copy from or to the device until `resume`, and wait for copies that are running."""
        for task in self._copying:
            await task.pause()

    def resume(self) -> None:
        """Allow copies again after `pause`."""
        for task in self._copying:
            task.resume()

    def note_reload(self, folder: Path) -> None:
        """Update the KV fingerprint and the adapters' base after a reload from `folder`."""
        if self.tier_tasks is not None and self.tier_tasks.tiers.disk is not None:
            self.tier_tasks.tiers.fingerprint = _fingerprint(folder, self._config, self.runtime)
        if self.runtime.adapters is not None:
            self.runtime.adapters.rebase(folder)

    def flush_caches(self) -> None:
        """Drop cached prefixes and embeddings of images. Nothing may run."""
        self.scheduler.flush_cache()
        if self.images is not None:
            self.images.forget_keys()

    async def close(self) -> None:
        """Close the copies, the device, grammars and the timeline. No step may be launched afterwards.

        Errors are only logged, because callers must not wait for a lost device.
        """
        closers: list[Callable[[], Awaitable[None]]] = [task.close for task in self._copying]
        closers.append(partial(anyio.to_thread.run_sync, self.runtime.close))
        try:
            for close in closers:
                try:
                    await close()
                except Exception as error:
                    log.error("the device could not be closed cleanly", exc_info=error)
        finally:
            self.grammars.close()
            if self.timeline is not None:
                try:
                    self.timeline.close()
                except RuntimeError as error:  # a lost device cannot report when it was busy
                    log.error("the timeline could not be completed", exc_info=error)


def _holdings(config: EngineConfig, pool: PoolSize, most_drafts: int) -> list[Holding]:
    """Return the kinds of memory that sequences of this model hold besides pages."""
    holdings: list[Holding] = []
    if pool.windows is not None:
        holdings.append(SequenceWindows(pool.windows, config.page_size))
    if pool.states is not None:
        snapshots = pool.states.snapshots
        holdings.append(SequenceSnapshots(snapshots, config.max_num_seqs, config.page_size, most_drafts > 0))
    return holdings


def load(config: EngineConfig, latencies: Latencies, start: Start | None) -> Loaded:
    """Load the model that the config names. Blocks until it is loaded; call it in a worker thread.

    Cheap checks come first: the grammar library and the tokenizer are loaded before torch is imported. Meanwhile a
    second thread links torch's libraries and opens the device's context. While weights stream to the device, it
    completes the tokenizer and makes the grammars.

    latencies: of the engine. start: makes the runtime. None means `start_runtime`.
    """
    read_speculation(config.speculation)
    folder = resolve_model(config.model, config.revision)
    disk = open_disk(config)
    stamps = [time.perf_counter()]
    with without_collections(), QuickSwitches(), ThreadPoolExecutor(1, "aengine-text") as background:
        gpus = 1 if config.tensor_parallel_size == "auto" else config.tensor_parallel_size
        check_library()
        warm_up_library()
        background.submit(link_torch)  # first: linking any other library would wait for it
        contexts = background.submit(open_contexts, config.device, gpus)
        tokenizer = _load_tokenizer(config, folder)
        stamps.append(time.perf_counter())
        from aengine.engine.pooling.scores import make_scorer
        from aengine.model.loading.generation import GenerationDefaults
        from aengine.model.loading.pooling import PoolingConfig
        from aengine.runtime.startup.start import start_runtime

        stamps.append(time.perf_counter())
        model = read_model_config(config, folder)
        pooling = PoolingConfig.from_folder(folder, model)
        if config.matryoshka and pooling.dimensions is None:
            pooling = replace(pooling, dimensions=())
        scorer = make_scorer(config.rerank_template, config.model or "", tokenizer, model, pooling)
        # The demo model's tokenizer replaces a missing one. Its end-of-sequence token is not this model's.
        eos = tokenizer.eos_token_id if (folder / "tokenizer.json").exists() else None
        generation = GenerationDefaults.from_folder(folder, model, eos)
        contexts.result()
        stamps.append(time.perf_counter())
        log.debug("tokenizer %.2f s, torch %.2f s, contexts %.2f s", *(b - a for a, b in itertools.pairwise(stamps)))
        making: Future[Grammars] | None = None

        def make_grammars() -> Grammars:
            tokenizer.complete()
            limits = GrammarLimits(config.grammar_characters, config.grammar_nesting, config.grammar_seconds)
            return Grammars(tokenizer, model.vocab_size, generation.eos_token_ids, limits)

        def begin_text() -> None:
            nonlocal making
            making = background.submit(make_grammars)

        try:
            timeline = None if config.timeline is None else Timeline(config.timeline)
            # The memory for adapters depends on the adapters that the config names.
            here = {name: str(resolve_adapter(path)) for name, path in config.lora.items()}
            runtime = (start or start_runtime)(replace(config, lora=here), folder, model, begin_text)
            try:
                if runtime.pool.max_model_len > (near := model.near_positions) > 0:
                    log.info(
                        "longrope: requests whose prompt and max_tokens fit into %d tokens take the short factors, as "
                        "in transformers; all others take the long ones, from their first token on", near,
                    )  # fmt: skip
                adapters = _read_adapters(config, runtime)
                grammars = make_grammars() if making is None else making.result()
                if timeline is not None:
                    runtime.runner.trace(timeline)
                return Loaded(
                    config,
                    latencies,
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
                    _image_reading(runtime.model, tokenizer),
                )
            except BaseException:
                with ExitStack() as stack:
                    stack.callback(runtime.close)
                    for part in (runtime.copies, runtime.adapters):
                        if part is not None:
                            stack.callback(part.close)
                raise
        except BaseException:
            if making is not None and making.exception() is None:
                making.result().close()
            raise


def _fingerprint(folder: Path, config: EngineConfig, runtime: Runtime) -> bytes:
    weights = b"" if runtime.weights is None else runtime.weights.digest
    return fingerprint_of(folder, config, runtime.model, weights, runtime.dtypes)


def read_model_config(config: EngineConfig, folder: Path) -> ModelConfig:
    """Return the configuration of the model in `folder`, with the changes that knobs request.

    Raises `CheckpointError`, `ConfigError`.
    """
    from aengine.model.config import ModelConfig
    from aengine.model.loading.pooling import without_head

    model = ModelConfig.from_folder(folder)
    if config.load_format == "auto":
        model = without_head(folder, model)
    if config.unpacked_copies:
        model = model.with_unpacked_copies()
    return model if config.quantization == "auto" else model.quantized_as(config.quantization)


def _image_reading(model: ModelConfig, tokenizer: Tokenizer) -> ImageReading | str:
    """Return a reader of images, or why the model takes none."""
    if model.tower is None:
        return model.no_images
    from aengine.engine.requests.image_reading import ImageReading

    try:
        return ImageReading(model.tower, tokenizer)
    except CheckpointError as error:
        log.warning("images: off, because %s", error)
        return str(error)


def _read_adapters(config: EngineConfig, runtime: Runtime) -> Adapters | None:
    """Read the adapters that the config names. Returns None if the device has no memory for adapters.

    Raises `AdapterError` and `ConfigError`.
    """
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
        return Tokenizer.begin_load(resolve_model(None, None), chat_template=config.chat_template)
    fields = Fields(read_json_object(path := folder / "config.json"), str(path))
    vocab_size = fields.vocab_size if fields.present("vocab_size") else None  # `ModelConfig` refuses a missing one
    return Tokenizer.begin_load(folder, vocab_size, config.chat_template)
