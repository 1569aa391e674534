"""Prefill attention through flash-attn, in the best form that is installed.

- `flash_attn.cute` (flash-attn-4), Hopper and data-centre Blackwell: on gathered K and V, which is 13 % faster than on
  pages, or, where there is little to read or no room, on the pages.
- `flash_attn` (2): on gathered K and V, because its pages must be multiples of 256 tokens.
- torch's own varlen flash kernel: on gathered K and V; needs no package.

None of them takes float32, for which the torch reference stands in, or all widths of heads, and flash-attn-4 alone
knows of scores that are capped or have sinks: for the rest see `triton_chunks`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.attention.chunk_groups import MOST_GATHERED, attend_apart, attend_in_groups
from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.kv_scales import FP8, as_bytes

HALVES = (torch.bfloat16, torch.float16)
Kind = tuple[int, bool]  # of a layer's heads: head_dim, and whether its scores are plain


class PrefillAttention(Protocol):
    """Attention of a step's prefill chunks, all of them in one call."""

    name: str
    why: str
    capturable: bool  # reads nothing of the step on the host but max(query_lens), which may be a bound

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        """Whether a captured step of so many tokens can have chunks of these contexts."""
        ...

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        chunks: AttentionBatch,
        scale: float,
        window: int | None,
        value_scale: float = 1.0,
        scores: Scores = PLAIN,
    ) -> Tensor:
        """Attend causally, aligned to the ends of contexts; returns [tokens, heads, dim].

        q [tokens, heads, dim] of the whole step: those of chunks are the last ones, and query_starts of `chunks` count
        from the first token of the step. What is returned for tokens before them means nothing.

        value_scale, scores: as `AttentionBackend` has them.
        """
        ...


class FlashAttention(PrefillAttention, Protocol):
    """By one of these kernels."""

    def takes(self, dim: int, plain: bool) -> bool:
        """Whether heads may be so wide, and their scores be other than `plain`."""
        ...


@dataclass(slots=True)
class _Gathered:
    """Where the keys of each chunk lie that its queries see, one chunk after the other."""

    slots: Tensor  # [keys of all chunks] int64
    key_starts: Tensor  # [chunks + 1] int32
    max_queries: int
    max_keys: int


def _make_gather_plan(chunks: AttentionBatch, page_size: int, window: int | None) -> _Gathered:
    unseen, seen_lens = chunks.unseen(window).long(), chunks.seen_lens(window)
    lens = chunks.seq_lens - unseen
    key_starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    total = sum(seen_lens)
    sequence = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=total)
    position = torch.arange(total, device=lens.device) - (key_starts[:-1] - unseen)[sequence]
    slots = chunks.page_table[sequence, position // page_size].long() * page_size + position % page_size
    return _Gathered(slots, key_starts.int(), max(chunks.query_lens), max(seen_lens))


class OnGathered:
    """A varlen kernel over K and V copied out of their pages."""

    capturable = False

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        return False

    def __init__(self, name: str, why: str, kernel: Callable[..., Tensor]) -> None:
        self.name = name
        self.why = why
        self._kernel = kernel

    def takes(self, dim: int, plain: bool) -> bool:
        """As `FlashAttention.takes`."""
        return plain and dim <= 256 and dim % 8 == 0

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        chunks: AttentionBatch,
        scale: float,
        window: int | None,
        value_scale: float = 1.0,
        scores: Scores = PLAIN,
    ) -> Tensor:
        def attend(q: Tensor, group: AttentionBatch) -> Tensor:
            plan = group.plan(_Gathered, lambda: _make_gather_plan(group, k_cache.shape[1], window), window)
            k, v = (as_bytes(cache).flatten(0, 1).index_select(0, plan.slots) for cache in (k_cache, v_cache))
            if k_cache.dtype == FP8:  # [keys, kv_heads, dim]
                k, v = k.view(FP8).to(q.dtype), v.view(FP8).to(q.dtype).mul_(value_scale)
            return self._kernel(q, k, v, group.query_starts, plan, scale, window)

        def in_groups(q: Tensor, chunks: AttentionBatch) -> Tensor:
            return attend_in_groups(q, chunks, chunks.seen_lens(window), MOST_GATHERED, window, attend)

        return attend_apart(q, chunks, in_groups)


class _Reference:
    """The torch backend, for dtypes that no flash kernel takes."""

    name = "torch"
    capturable = False

    def __init__(self, why: str) -> None:
        self.why = why
        self._backend = TorchAttention()

    def takes(self, dim: int, plain: bool) -> bool:
        """As `FlashAttention.takes`: it has other scores of a chunk all at once, and those of a long prompt no room."""
        return plain

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        return False

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        chunks: AttentionBatch,
        scale: float,
        window: int | None,
        value_scale: float = 1.0,
        scores: Scores = PLAIN,
    ) -> Tensor:
        def attend(q: Tensor, chunks: AttentionBatch) -> Tensor:
            return self._backend.forward(q, k_cache, v_cache, chunks, scale, window, value_scale, scores)

        return attend_apart(q, chunks, attend)


class SomeHeads:
    """A flash kernel for layers whose heads and scores it takes, and something else for the others."""

    def __init__(self, flash: FlashAttention, others: PrefillAttention) -> None:
        self.name = f"{flash.name} and {others.name}"
        self.why = f"{flash.why}; {others.why}"
        self.capturable = flash.capturable and others.capturable
        self._flash = flash
        self._others = others

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        return self._flash.fits(tokens, contexts, page_size) and self._others.fits(tokens, contexts, page_size)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        chunks: AttentionBatch,
        scale: float,
        window: int | None,
        value_scale: float = 1.0,
        scores: Scores = PLAIN,
    ) -> Tensor:
        attend = self._flash if self._flash.takes(q.shape[-1], scores.plain) else self._others
        return attend(q, k_cache, v_cache, chunks, scale, window, value_scale, scores)


def _flash2(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, plan: _Gathered, scale: float, window: int | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    out: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        starts,
        plan.key_starts,
        plan.max_queries,
        plan.max_keys,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return out


def _torch_flash(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, plan: _Gathered, scale: float, window: int | None
) -> Tensor:
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        starts,
        plan.key_starts,
        plan.max_queries,
        plan.max_keys,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return out


def choose_prefill(
    device: torch.device, dtype: torch.dtype, longest: int = 0, kinds: Collection[Kind] = (), latents: bool = False
) -> PrefillAttention:
    """The best prefill attention for this device and dtype, with the reason for the start-up log.

    longest: of the contexts whose keys must have room out of their pages, as those of an FP8 cache. kinds: of the
    model's layers. latents: whether they attend to these.
    """
    if latents:
        return _triton_chunks("no flash kernel reads latents")
    if dtype not in HALVES:
        return for_kinds(kinds, _Reference(f"no flash kernel takes {str(dtype).removeprefix('torch.')}"))
    return for_kinds(kinds, _choose_flash(device, longest))


def for_kinds(kinds: Collection[Kind], flash: FlashAttention) -> PrefillAttention:
    """The flash kernel, and our own for the kinds of layers that it does not take."""
    others = sorted(kind for kind in kinds if not flash.takes(*kind))
    if not others:
        return flash
    named = (f"heads of {dim}{'' if plain else ' with sinks or capped scores'}" for dim, plain in others)
    chunks = _triton_chunks(f"{flash.name} is not for {', '.join(named)}")
    return chunks if len(others) == len(kinds) else SomeHeads(flash, chunks)


def _choose_flash(device: torch.device, longest: int) -> FlashAttention:
    fits = flash4_runs_on(torch.cuda.get_device_capability(device))
    keep_compiled()
    if fits and (cute := import_flash4()) is not None:
        from aengine.attention.flash4 import Flash4  # brings Triton

        return Flash4("installed", cute, longest)
    missing = "flash-attn-4 is not installed" if fits else "flash-attn-4 does not run on this device"
    if _import("flash_attn") is not None:
        return OnGathered("flash-attn-2", missing, _flash2)
    return OnGathered("torch flash", f"{missing}, flash-attn neither (pip install '.[cuda]')", _torch_flash)


def _triton_chunks(why: str) -> PrefillAttention:
    from aengine.attention.triton_chunks import TritonChunks  # brings Triton

    return TritonChunks(why)


def flash4_runs_on(capability: tuple[int, int]) -> bool:
    """Hopper and data-centre Blackwell."""
    return capability[0] in (9, 10)


def flash4_is_installed() -> bool:
    """Looked up, not imported."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def flash4_cache() -> Path | None:
    """Where flash-attn-4 keeps its compiled kernels, once `keep_compiled` has said so."""
    kept = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1"
    folder = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    return Path(folder) if kept and folder else None


def keep_compiled() -> None:
    """Let flash-attn-4 keep its compiled kernels, in the user's own cache folder, unless told otherwise.

    It reads these variables when it is imported. Its own choice is a folder that other users could have prepared.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aengine" / "flash-attn-4"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return  # then every process compiles its own
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


def import_flash4() -> Callable[..., Any] | None:
    """flash-attn-4's varlen attention, None where it is not installed.

    It needs some modules of the package quack, whose `__init__` brings torch's compiler: two thirds of its import.
    """
    with _without_init("quack", but="quack.dsl"):
        found = _import("flash_attn.cute")
    return found or _import("flash_attn.cute")


@contextmanager
def _without_init(package: str, but: str) -> Iterator[None]:
    """Within, modules of a package are imported without what its `__init__` does, but for importing `but`."""
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or "CUTE_DSL_PTXAS_PATH" in os.environ:  # which that `__init__` heeds
        yield
        return
    bare = sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        with suppress(ImportError):
            importlib.import_module(but)
        yield
    finally:
        if sys.modules.get(package) is bare:
            del sys.modules[package]


def _import(module: str) -> Callable[..., Any] | None:
    """Its function for varlen attention."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of these packages about each other
            found: Callable[..., Any] = importlib.import_module(module).flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None
    return found
