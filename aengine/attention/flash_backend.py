"""Prefill attention through the best flash kernel that is installed.

- flash-attn-4 (`flash_attn.cute`), on Hopper and data-centre Blackwell. It gathers K and V, which is 13 % faster than
  reading the pages. It reads the pages if there are few tokens, or too many keys for the buffers.
- flash-attn-2 (`flash_attn`), on gathered K and V. It can read pages only if they have a multiple of 256 tokens.
- torch's varlen flash kernel, on gathered K and V. It needs no package.

None of them supports float32; `TorchPrefill` replaces them. None supports every head_dim, and only flash-attn-4
supports softcap and sinks. `TritonAttention` uses our own kernel for the layers that the chosen one does not support.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aengine.attention.base import Attend, AttentionBatch, AttentionLayer, PrefillKernel
from aengine.attention.chunk_groups import MOST_GATHERED, attend_in_groups, attend_without_decodes
from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.kv_scales import FP8, as_bytes

HALVES = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Gathered:
    """The slots of all keys that the queries of chunks see, chunk after chunk."""

    slots: Tensor  # [keys of all chunks] int64: page * page_size + offset
    key_starts: Tensor  # [chunks + 1] int32: the first key of each chunk, then the number of keys
    max_queries: int
    max_keys: int


def _make_gather_plan(chunks: AttentionBatch, page_size: int, window: int | None) -> Gathered:
    unseen, seen_lens = chunks.unseen(window).long(), chunks.seen_lens(window)
    lens = chunks.seq_lens - unseen
    key_starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    total = sum(seen_lens)
    sequence = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=total)
    position = torch.arange(total, device=lens.device) - (key_starts[:-1] - unseen)[sequence]
    slots = chunks.page_table[sequence, position // page_size].long() * page_size + position % page_size
    return Gathered(slots, key_starts.int(), max(chunks.query_lens), max(seen_lens))


# q, k, v, query_starts, plan, scale, window
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Gathered, float, int | None], Tensor]


class OnGathered(PrefillKernel):
    """A varlen kernel over K and V that are gathered from their pages."""

    def __init__(self, name: str, why: str, kernel: VarlenKernel) -> None:
        self.name = name
        self.why = why
        self._kernel = kernel

    def bind(self, layer: AttentionLayer) -> Attend | None:
        supported = layer.scores.plain and layer.head_dim <= 256 and layer.head_dim % 8 == 0
        return self.attend_for(layer) if supported else None

    def attend_for(self, layer: AttentionLayer) -> Attend:
        """Return the attention of a layer that the kernel supports."""
        kernel, window = self._kernel, layer.window

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: AttentionBatch, /) -> Tensor:
            def attend_to(q: Tensor, group: AttentionBatch) -> Tensor:
                plan = group.plan(Gathered, lambda: _make_gather_plan(group, k_cache.shape[1], window), window)
                k, v = (as_bytes(cache).flatten(0, 1).index_select(0, plan.slots) for cache in (k_cache, v_cache))
                if k_cache.dtype == FP8:  # [keys, kv_heads, dim]
                    k, v = k.view(FP8).to(q.dtype), v.view(FP8).to(q.dtype).mul_(layer.value_scale)
                return kernel(q, k, v, group.query_starts, plan, layer.scale, window)

            def in_groups(q: Tensor, chunks: AttentionBatch) -> Tensor:
                return attend_in_groups(q, chunks, chunks.seen_lens(window), MOST_GATHERED, window, attend_to)

            return attend_without_decodes(q, chunks, in_groups)

        return attend


class TorchPrefill(PrefillKernel):
    """The torch backend, for dtypes that no flash kernel supports.

    It does not support softcap and sinks. For these torch would store the scores of an entire chunk, and a long prompt
    has no memory for them.
    """

    name = "torch"

    def __init__(self, why: str) -> None:
        self.why = why
        self._backend = TorchAttention()

    def bind(self, layer: AttentionLayer) -> Attend | None:
        if not layer.scores.plain:
            return None
        attend_all = self._backend.bind(layer)

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: AttentionBatch, /) -> Tensor:
            return attend_without_decodes(q, chunks, lambda q, chunks: attend_all(q, k_cache, v_cache, chunks))

        return attend


def _flash2(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, plan: Gathered, scale: float, window: int | None
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
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, plan: Gathered, scale: float, window: int | None
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


def choose_prefill(device: torch.device, dtype: torch.dtype, longest: int = 0) -> PrefillKernel:
    """Return the best prefill kernel for this device and dtype.

    longest: the longest context of an FP8 cache, in tokens; 0: the cache is not FP8.
    """
    if dtype not in HALVES:
        return TorchPrefill(f"no flash kernel takes {str(dtype).removeprefix('torch.')}")
    supported = flash4_runs_on(torch.cuda.get_device_capability(device))
    keep_compiled()
    if supported and (cute := import_flash4()) is not None:
        from aengine.attention.flash4 import Flash4  # imports Triton

        return Flash4("installed", cute, longest)
    missing = "flash-attn-4 is not installed" if supported else "flash-attn-4 does not run on this device"
    if _import("flash_attn") is not None:
        return OnGathered("flash-attn-2", missing, _flash2)
    return OnGathered("torch flash", f"{missing}, flash-attn neither (pip install '.[cuda]')", _torch_flash)


def flash4_runs_on(capability: tuple[int, int]) -> bool:
    """Return whether a GPU is Hopper or data-centre Blackwell."""
    return capability[0] in (9, 10)


def flash4_is_installed() -> bool:
    """Return whether flash-attn-4 is installed, without importing it."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def flash4_cache() -> Path | None:
    """Return the folder of flash-attn-4's compiled kernels, or None. Call `keep_compiled` first."""
    kept = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1"
    folder = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    return Path(folder) if kept and folder else None


def keep_compiled() -> None:
    """Let flash-attn-4 keep its compiled kernels in the user's cache folder, unless the environment says otherwise.

    flash-attn-4 reads these variables when it is imported. By default it uses a folder that other users can write to.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aengine" / "flash-attn-4"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return  # every process compiles its own kernels
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


def import_flash4() -> Callable[..., Any] | None:
    """Return flash-attn-4's varlen attention, or None if it is not installed.

    flash-attn-4 imports modules of the package quack, whose `__init__` imports torch's compiler. That would take two
    thirds of the time, so quack's `__init__` is not run.
    """
    with _without_init("quack", but="quack.dsl"):
        found = _import("flash_attn.cute")
    return found or _import("flash_attn.cute")


@contextmanager
def _without_init(package: str, but: str) -> Iterator[None]:
    """Skip a package's `__init__` when its modules are imported in this block. Module `but` is imported first."""
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or "CUTE_DSL_PTXAS_PATH" in os.environ:  # quack's `__init__` reads this variable
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
    """Return the module's varlen attention, or None if the module cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # these packages warn about each other
            found: Callable[..., Any] = importlib.import_module(module).flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None
    return found
