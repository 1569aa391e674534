"""A start-up on CUDA without a GPU, and the variants of kernels that it launches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.attention.base import PrefillKernel
from aengine.attention.flash4 import Flash4
from aengine.attention.flash_backend import OnGathered
from aengine.config import EngineConfig
from aengine.kernels import triton_kernels
from aengine.kernels.draw import gumbel
from aengine.kernels.experts.packed import rows as packed_rows
from aengine.kernels.experts.packed import single_rows as packed_single_rows
from aengine.kernels.launch import Launch
from aengine.kernels.linear.fp8 import library as fp8_library
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
from aengine.kernels.linear.int4 import launch as int4_launch
from aengine.kernels.linear.int4.block import unpacking
from aengine.kernels.offline import OfflineDriver
from aengine.model.lora.files import WEIGHTS
from aengine.runtime import runner
from aengine.runtime.adapters import HostFiller
from aengine.runtime.startup import start_cuda
from aengine.runtime.startup.compiling.compile_ahead import CompileAhead
from aengine.runtime.startup.compiling.job import Job
from aengine.sampling.fused import FusedDraw
from aengine.sampling.sampler import Sampler
from tests.kernels.offline import take_over

DEVICE, META = torch.device("cpu"), torch.device("meta")
empty = torch.empty
H200 = Launch(processors=132, overlap=True, shared_memory=227 * 1024, capability=(9, 0))
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4}
EXPERTS |= {"moe_intermediate_size": 256, "norm_topk_prob": True}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}}
# Of 129 to 256 rows, down is multiplied in pieces.
WIDE_FP8 = FP8 | {"hidden_size": 2048, "intermediate_size": 10240}
INT4 = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}}
GPT_OSS: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64}
GPT_OSS |= {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 256, "sliding_window": 128}
GPT_OSS |= {"quantization_config": {"quant_method": "mxfp4"}}
LATENTS: dict[str, Any] = {"first_k_dense_replace": 0, "topk_method": "greedy", "num_key_value_heads": 16}
LATENTS |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
LATENTS |= {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
LATENTS |= {"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "n_shared_experts": 1}
NEMOTRON: dict[str, Any] = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "n_groups": 8}
NEMOTRON |= {"layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 16}
NEMOTRON |= {"mamba_head_dim": 64, "ssm_state_size": 128, "mlp_hidden_act": "relu2"}
NEMOTRON |= {"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
NEMOTRON |= {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 512, "routed_scaling_factor": 2.5}
LLAMA4: dict[str, Any] = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_hidden_layers": 4}
LLAMA4 |= {"num_local_experts": 16, "interleave_moe_layer_step": 2, "intermediate_size": 256}
LLAMA4 |= {"intermediate_size_mlp": 512, "attention_chunk_size": 1024}
MIMO: dict[str, Any] = {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "head_dim": 192}
MIMO |= {"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "num_hidden_layers": 3}
LORA: dict[str, Any] = {"lora_loading": True, "max_loras": 2}
OF_EXPERTS: dict[str, Any] = LORA | {"lora": {"of-experts": "adapter"}}  # below the test's folder
GIB = 2**30


@dataclass
class Variants:
    """Variants of kernels. new: variants that were not known before."""

    offline: OfflineDriver
    known: set[str] = field(default_factory=set)
    new: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)  # of the compiling processes of each start-up
    flash: set[str] = field(default_factory=set)  # of flash-attn-4, by what its kernels are made for

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        *_, binder = kernel.device_caches[self.offline.get_current_device()]
        _, specialization, chosen = binder(*args, **options)
        variant = f"{kernel.fn.__module__} {kernel.fn.__name__} {specialization} {chosen}"
        if variant not in self.known:
            self.known.add(variant)
            self.new.append(variant)


def zeros_like(tensor: Tensor, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)


def zeros(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
    if options.get("device") == META:
        return empty(*shape, **options)
    return torch.zeros(*shape, **options)


def replace_cuda(monkeypatch: pytest.MonkeyPatch) -> Variants:
    """Replace everything of CUDA that a start-up and a step touch."""
    variants = Variants(OfflineDriver(90, device=2000))
    take_over(monkeypatch, variants.offline, H200, variants.launch)
    monkeypatch.setattr(start_cuda, "launch_for", lambda device: H200)

    @contextlib.contextmanager
    def no_processes(job: Job) -> Iterator[CompileAhead]:
        variants.jobs.append(job)
        yield CompileAhead([], [])

    monkeypatch.setattr(start_cuda, "compile_ahead", no_processes)
    monkeypatch.setattr(start_cuda, "DeviceFiller", lambda *_: HostFiller())
    # What a kernel would have written are zeros: ids and lengths that exist.
    monkeypatch.setattr(torch, "empty", zeros)
    monkeypatch.setattr(torch, "empty_like", zeros_like)
    monkeypatch.setattr(Tensor, "new_empty", Tensor.new_zeros)
    monkeypatch.setattr(Tensor, "addmm_", lambda self, *_: self)
    # What cuBLAS would do takes a CPU minutes.
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight)))
    monkeypatch.setattr(torch, "mm", lambda *_, out: out)
    monkeypatch.setattr(torch, "bmm", lambda *_, out: out)
    monkeypatch.setattr(triton_kernels, "launch_for", lambda device: H200)
    monkeypatch.setattr(
        fp8_library.LibraryFp8,
        "_whole",
        lambda self, x, x_scale, residual, rows, dtype: x.new_zeros(rows, len(self._weight), dtype=dtype),
    )
    monkeypatch.setattr(BlockProducts, "takes", lambda *_: True)
    monkeypatch.setattr(
        fp8_library.Pieces,
        "__call__",
        lambda self, x, x_scale, weight, dtype: x.new_zeros(self.count, len(x), len(weight), dtype=dtype),
    )
    # What a CPU's interpreter cannot run is unpacked otherwise.
    for module in (int4_launch, packed_rows, packed_single_rows):
        monkeypatch.setattr(module, "unpacking", lambda _, *how, **more: unpacking(torch.bfloat16, *how, **more))
    real = gumbel.Draw.__call__
    monkeypatch.setattr(
        gumbel.Draw, "__call__", lambda *args, **options: ((drawn := real(*args, **options))[0], drawn[1].logical_not())
    )

    def sampler(max_rows: int, vocab_size: int, device: torch.device, most_draws: int, use_kernels: bool) -> Sampler:
        assert use_kernels
        made = Sampler(max_rows, vocab_size, device)
        made._fused = FusedDraw(most_draws, device)
        return made

    monkeypatch.setattr(runner, "Sampler", sampler)

    def nothing(*args: object, **options: object) -> None:
        pass

    stream = SimpleNamespace(synchronize=nothing)
    for name, stand_in in {
        "set_device": nothing,
        "empty_cache": nothing,
        "reset_peak_memory_stats": nothing,
        "set_per_process_memory_fraction": nothing,
        "graph_pool_handle": nothing,
        "device_count": lambda: 1,
        "get_device_name": lambda device: "H200",
        "get_device_capability": lambda device: (9, 0),
        "mem_get_info": lambda device: (2 * GIB, 2 * GIB),
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: GIB // 2,
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": contextlib.nullcontext,
        "CUDAGraph": lambda: SimpleNamespace(replay=nothing, capture_begin=nothing, capture_end=nothing),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return variants


def flash4(seen: set[str]) -> Flash4:
    """Attends to nothing, and says which of flash-attn-4's kernels would have: chunks that fill no tile have others."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, *, max_seqlen_q: int | None = None, window_size: object = None,
        **options: object,
    ) -> Tensor:  # fmt: skip
        place, most = "pages" if "page_table" in options else "gathered", max_seqlen_q
        if most is None:  # of a tower
            place, most = "whole", q.shape[1]
        small = most * q.shape[-2] // k.shape[-2] <= 128
        seen.add(f"{place} {'small' if small else 'large'} {window_size} {list(q.shape[-2:])} {k.dtype}")
        return torch.zeros_like(q)

    return Flash4("", kernel)


def attention_of(name: str, seen: set[str]) -> PrefillKernel:
    """A prefill kernel that attends to nothing."""
    if name == "flash-attn-4":
        return flash4(seen)
    return OnGathered(name, "", lambda q, *_: torch.zeros_like(q))


def cuda_config(rows: int, **knobs: Any) -> EngineConfig:
    """Return the settings of an engine without weights."""
    return EngineConfig(
        device="cuda", dtype="bfloat16", load_format="dummy", max_num_seqs=rows, page_size=16, progress=False, **knobs
    )


def checkpoint(folder: Path, kv_heads: int, more: dict[str, Any]) -> Path:
    """The 0.6B shape, with a small vocabulary and two layers: the feed-forward part of the last has the rows that are
    drawn from. more: of its configuration.
    """
    family = "Qwen3Moe" if "num_experts" in more else "Qwen3"
    shape: dict[str, Any] = {
        "vocab_size": 9000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 7,
    }
    (folder / "config.json").write_text(
        json.dumps({"architectures": [f"{family}ForCausalLM"], "model_type": "qwen3", **shape, **more})
    )
    return folder


def with_adapters(knobs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the knobs. If they name adapters, add a folder with an adapter of an expert."""
    if "lora" not in knobs:
        return knobs
    adapter = folder / "adapter"
    adapter.mkdir()
    expert = "base_model.model.model.layers.0.mlp.experts.0.gate_proj"
    factors = {"A": torch.randn(8, 1024), "B": torch.randn(256, 8)}
    save_file({f"{expert}.lora_{name}.weight": factor for name, factor in factors.items()}, adapter / WEIGHTS)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["gate_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return knobs | {"lora": {name: str(adapter) for name in knobs["lora"]}}
