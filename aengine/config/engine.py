"""The knobs of the engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_LORAS = 256
MAX_LORA_RANK = 256
_LORAS = 8  # on the device, where nothing says how many


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of an `Engine`. `None` means: chosen from the model and the machine."""

    model: Annotated[
        str | None, Meta(description="checkpoint folder or Hugging Face id; default: the embedded demo model")
    ] = None
    revision: Annotated[str | None, Meta(description="revision of a Hugging Face id")] = None
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="dummy: random weights from config.json alone")
    ] = "auto"
    chat_template: Annotated[
        str | None, Meta(description="file with the chat template (Jinja); default: the checkpoint's own")
    ] = None
    device: Annotated[str, Meta(description="auto, cpu, cuda or cuda:N")] = "auto"
    tensor_parallel_size: Annotated[
        Literal["auto", 1, 2, 4, 8],
        Meta(description="GPUs that the model is spread over: `device` and those behind it; auto: as few as hold it"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="auto: the checkpoint's on a GPU, float32 on a CPU"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "fp8", "awq", "gptq", "compressed-tensors", "mxfp4"],
        Meta(
            description="what matrices are kept in; auto: as in the checkpoint; fp8: floats become e4m3 in blocks of "
            "128 x 128 while they are loaded; others: as auto, and the checkpoint must have it"
        ),
    ] = "auto"
    unpacked_copies: Annotated[
        bool | None,
        Meta(
            description="on a GPU, keep 4-bit matrices in the model's dtype as well, those of experts aside: steps of "
            "128 tokens and more are as fast as without quantisation, for 2 bytes a weight; default: of dense models, "
            "where that is an eighth of the memory for keys and values at most and sleep_mode, kv_cache_gib and "
            "num_pages are not set"
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="what keys and values are kept in; auto: the model's dtype; fp8: e4m3, twice the tokens of "
            "bfloat16, by the checkpoint's scales or 1"
        ),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "torch", "triton"], Meta(description="attention backend; auto picks by device")
    ] = "auto"
    cuda_graphs: Annotated[bool, Meta(description="replay decode steps as CUDA graphs")] = True
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="longest prompt + output, in tokens; default: the model's own"),
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="most sequences running at once (device rows)")] = 256
    max_step_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="most tokens in one step; longer prompts are prefilled in chunks; default on a GPU: 8192, or "
            "16384 where they take 0.2 s at most (4 billion parameters on an H100); on a CPU: 512"
        ),
    ] = None
    max_mixed_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="most tokens in a step that both decodes and prefills (fewer far into a long prompt); "
            "default on a GPU: about 75 ms of work, on a CPU: max_step_tokens"
        ),
    ] = None
    page_size: Annotated[int, Meta(ge=1, le=1024, description="tokens per KV page")] = 16
    num_pages: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="KV pages, page 0 (reserved) included; default: sized from memory"),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of each GPU's memory that the engine may use")
    ] = 0.9
    kv_cache_gib: Annotated[
        Annotated[float, Meta(gt=0, le=2**20)] | None,
        Meta(description="KV pool size in GiB, on each GPU; default on a CPU: 1, on a GPU: what is left"),
    ] = None
    prefix_cache: Annotated[bool, Meta(description="reuse the KV of shared prefixes")] = True
    host_cache_gib: Annotated[
        float,
        Meta(
            ge=0,
            le=2**20,
            description="host memory for KV pages that leave the pool, in GiB, of all GPUs together; 0: none",
        ),
    ] = 0.0
    disk_cache_dir: Annotated[
        str | None,
        Meta(description="folder for KV pages of the host cache, so that a later start finds them; one engine's own"),
    ] = None
    disk_cache_gib: Annotated[
        float, Meta(gt=0, le=2**30, description="most GiB of files there; the least recently used go")
    ] = 64.0
    state_dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="what the states of linear attention are kept in")
    ] = "float32"
    state_snapshots: Annotated[
        Annotated[int, Meta(ge=0, le=2**16)] | None,
        Meta(
            description="states of linear attention that the prefix cache keeps; default: as many as half of the "
            "memory for the KV pool holds"
        ),
    ] = None
    state_snapshot_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**26)] | None,
        Meta(
            description="tokens from one such state to the next; default: 64 in outputs, or what 64 and page_size "
            "both divide; in prompts as many as take as much memory"
        ),
    ] = None
    window_context: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="tokens of a context for which memory is divided between layers with a sliding window and "
            "others: more make room for longer contexts, fewer for more of them; default: two windows, at least 2048, "
            "and fewer where otherwise max_num_seqs sequences would find no room for their windows"
        ),
    ] = None
    lookahead: Annotated[bool, Meta(description="launch a step before the tokens of the last one are read")] = True
    priority_aging: Annotated[
        float, Meta(ge=0, description="seconds of waiting that make up for one level of priority")
    ] = 30.0
    timeline: Annotated[
        str | None,
        Meta(description="write a Chrome trace of the run to this file (at most 128 MiB in two files)"),
    ] = None
    kv_events: Annotated[
        str | None,
        Meta(
            description="address on which to publish what the prefix cache stores and drops, as vLLM does "
            "(tcp://127.0.0.1:5557); replicas on Ray add their rank to the port"
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None, Meta(description="address that repeats events to whoever missed some (tcp://127.0.0.1:5558)")
    ] = None
    kv_events_topic: Annotated[str, Meta(max_length=256, description="what the events' messages begin with")] = ""
    max_queue: Annotated[
        int, Meta(ge=0, description="most choices (n a request) waiting; more are refused at once")
    ] = 1024
    grammar_characters: Annotated[int, Meta(ge=1, description="longest schema, regex or grammar of a request")] = (
        131_072
    )
    grammar_nesting: Annotated[
        int, Meta(ge=1, le=100, description="deepest JSON schema: objects and lists within each other")
    ] = 64
    grammar_seconds: Annotated[float, Meta(gt=0, description="most time to compile a request's grammar")] = 5.0
    rerank_template: Annotated[
        Literal["auto", "qwen3", "none"],
        Meta(
            description="what a reranker reads around a query and a document; qwen3: Qwen3-Reranker's words, which a "
            "language model answers by yes or no; auto: qwen3 where the model's name says so"
        ),
    ] = "auto"
    matryoshka: Annotated[
        bool, Meta(description="embeddings may be cut to fewer dimensions, though config.json does not say so")
    ] = False
    torch_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="threads of a step on a CPU; default: cores - 1, long steps all"),
    ] = None
    lora: Annotated[
        dict[str, str],
        Meta(description="adapters: the name that requests give, and a PEFT folder or Hugging Face id: a=path,b=path"),
    ] = {}
    max_loras: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_LORAS)] | None,
        Meta(
            description="most adapters on the device at once, the others wait in host memory; default: as many as are "
            "named, 8 at most"
        ),
    ] = None
    max_lora_rank: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_LORA_RANK)] | None,
        Meta(description="highest rank of an adapter; default: that of those named, 16 at least"),
    ] = None
    lora_loading: Annotated[
        bool, Meta(description="adapters may be loaded and unloaded while serving, over HTTP too")
    ] = False
    lora_host_gib: Annotated[
        Annotated[float, Meta(gt=0, le=2**20)] | None,
        Meta(description="most host memory for adapters, in GiB; default: a quarter of what the machine has"),
    ] = None
    sleep_mode: Annotated[
        bool, Meta(description="let the engine sleep: weights go to host memory and the GPU's memory is given back")
    ] = False
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1, description="seed of dummy weights")] = 0
    progress: Annotated[bool, Meta(description="show progress bars")] = True

    @property
    def model_name(self) -> str:
        """The Hugging Face id, or the checkpoint folder's name; `aengine-demo` for the embedded model."""
        if self.model is None:
            return "aengine-demo"
        return Path(self.model).resolve().name if Path(self.model).is_dir() else self.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may give: `model_name`, the folder's path as it was given, its absolute path."""
        if self.model is None:
            return (self.model_name,)
        paths = (os.path.abspath(self.model),) if Path(self.model).is_dir() else ()
        return tuple(dict.fromkeys((self.model_name, self.model, self.model.rstrip("/"), *paths)))

    def lora_places(self) -> int:
        """How many adapters the device has room for; 0: there are none."""
        if not self.lora and not self.lora_loading:
            return 0
        return self.max_loras or (_LORAS if self.lora_loading else min(len(self.lora), _LORAS))
