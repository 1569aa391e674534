"""The knobs of the engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from aengine.config.speculation import MAX_DRAFT_TOKENS

MAX_LORAS = 256
MAX_LORA_RANK = 256
_LORAS = 8  # slots on the device, if max_loras is not set


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of an `Engine`. None means that the model and the machine decide."""

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
        Meta(description="GPUs that share the model: `device` and the next ones; auto: as few as can hold it"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="auto: the checkpoint's on a GPU, float32 on a CPU"),
    ] = "auto"
    quantization: Annotated[
        Literal[
            "auto",
            "fp8",
            "awq",
            "gptq",
            "compressed-tensors",
            "mxfp4",
            "modelopt",
            "bitsandbytes",
            "auto-round",
            "fbgemm-fp8",
        ],
        Meta(
            description="format of the weights; auto: the checkpoint's; fp8: floats are converted to e4m3 in blocks of "
            "128 x 128 while loading; others: like auto, but the checkpoint must have this format"
        ),
    ] = "auto"
    unpacked_copies: Annotated[
        bool | None,
        Meta(
            description="on a GPU, also keep 4-bit matrices (not of experts) in the model's dtype; steps of 128 tokens "
            "and more are then as fast as without quantization, for 2 bytes per weight; default: on for dense models "
            "if it takes at most an eighth of the memory for keys and values, and sleep_mode, kv_cache_gib and "
            "num_pages are not set"
        ),
    ] = None
    images: Annotated[
        Literal["auto", "off"],
        Meta(description="auto: chats may contain images if the model supports it; off: text only"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="format of keys and values; auto: the model's dtype; fp8: e4m3 with the checkpoint's scales, "
            "or 1, for twice the tokens of bfloat16"
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "torch"],
        Meta(description="auto: on a GPU our own; torch: much slower, to compare with, or for GPUs on which ours fail"),
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
            "16384 if they take at most 0.2 s (4 billion parameters on an H100); on a CPU: 512"
        ),
    ] = None
    max_mixed_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="most tokens in a step with both decodes and prefills; later chunks of a long prompt get "
            "fewer; default on a GPU: about 75 ms of work, on a CPU: max_step_tokens"
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
        Meta(description="KV pool size in GiB, on each GPU; default on a CPU: 1, on a GPU: the remaining memory"),
    ] = None
    prefix_cache: Annotated[bool, Meta(description="reuse the KV of shared prefixes")] = True
    host_cache_gib: Annotated[
        float,
        Meta(
            ge=0,
            le=2**20,
            description="host memory for KV pages evicted from the pool, in GiB for all GPUs together; 0: none",
        ),
    ] = 0.0
    disk_cache_dir: Annotated[
        str | None,
        Meta(description="folder that keeps KV pages of the host cache for later starts; for one engine only"),
    ] = None
    disk_cache_gib: Annotated[
        float,
        Meta(gt=0, le=2**30, description="most GiB of files in disk_cache_dir; the least recently used are deleted"),
    ] = 64.0
    state_dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="dtype of the states of linear attention")
    ] = "float32"
    state_snapshots: Annotated[
        Annotated[int, Meta(ge=0, le=2**16)] | None,
        Meta(
            description="states of linear attention that the prefix cache may keep; default: half of the KV pool's "
            "memory is used for them"
        ),
    ] = None
    state_snapshot_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**26)] | None,
        Meta(
            description="tokens between two kept states; default in outputs: 64, or the least common multiple of 64 "
            "and page_size; in prompts: so many that their KV takes as much memory as a state"
        ),
    ] = None
    window_context: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="context length for which memory is divided between layers with a sliding window and others; "
            "more: room for longer contexts; less: room for more contexts; default: two windows, at least 2048, or "
            "less if max_num_seqs windows would not fit"
        ),
    ] = None
    speculation: Annotated[
        str,
        Meta(
            description="what drafts tokens, of which the model verifies several in one step; auto: the engine "
            "chooses; off: nothing; mtp: the checkpoint's MTP layers; ngram: repetitions within the sequence; "
            "eagle3=PATH, dflash=PATH, draft=PATH: a head or a smaller model, in a folder or with a Hugging Face id"
        ),
    ] = "auto"
    draft_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_DRAFT_TOKENS,
            description="most tokens that a step drafts for a sequence; 0: chosen by measurement",
        ),
    ] = 0
    lookahead: Annotated[bool, Meta(description="launch a step before the last step's tokens are read")] = True
    priority_aging: Annotated[float, Meta(ge=0, description="seconds of waiting that equal one level of priority")] = (
        30.0
    )
    timeline: Annotated[
        str | None,
        Meta(description="file for a Chrome trace of the run (at most 128 MiB, in two files)"),
    ] = None
    kv_events: Annotated[
        str | None,
        Meta(
            description="address for publishing what the prefix cache stores and evicts, as vLLM does "
            "(tcp://127.0.0.1:5557); with several API keys it needs salt_by_key off; replicas on Ray add their rank to "
            "the port"
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None, Meta(description="address that repeats missed events on request (tcp://127.0.0.1:5558)")
    ] = None
    kv_events_topic: Annotated[str, Meta(max_length=256, description="topic of the KV events' messages")] = ""
    max_queue: Annotated[
        int,
        Meta(ge=0, description="most outputs waiting (a request has n of them); further requests are refused at once"),
    ] = 1024
    grammar_characters: Annotated[int, Meta(ge=1, description="longest schema, regex or grammar of a request")] = (
        131_072
    )
    grammar_nesting: Annotated[
        int, Meta(ge=1, le=100, description="deepest nesting of objects and lists in a JSON schema")
    ] = 64
    grammar_seconds: Annotated[float, Meta(gt=0, description="most seconds for compiling a request's grammar")] = 5.0
    rerank_template: Annotated[
        Literal["auto", "qwen3", "none"],
        Meta(
            description="prompt of a reranker around a query and a document; qwen3: that of Qwen3-Reranker, which a "
            "language model answers with yes or no; auto: qwen3 if the model's name contains it"
        ),
    ] = "auto"
    matryoshka: Annotated[
        bool, Meta(description="allow embeddings with fewer dimensions even if config.json does not")
    ] = False
    torch_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="threads of a step on a CPU; default: cores - 1, or all for long steps"),
    ] = None
    lora: Annotated[
        dict[str, str],
        Meta(description="adapters: the name in requests, and a PEFT folder or Hugging Face id: a=path,b=path"),
    ] = {}
    max_loras: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_LORAS)] | None,
        Meta(
            description="most adapters on the device at once; others wait in host memory; default: the number of "
            "adapters in lora, at most 8"
        ),
    ] = None
    max_lora_rank: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_LORA_RANK)] | None,
        Meta(description="highest rank of an adapter; default: the highest of those in lora, at least 16"),
    ] = None
    lora_loading: Annotated[
        bool, Meta(description="allow loading and unloading adapters while serving, also over HTTP")
    ] = False
    lora_host_gib: Annotated[
        Annotated[float, Meta(gt=0, le=2**20)] | None,
        Meta(description="most host memory for adapters, in GiB; default: a quarter of the machine's"),
    ] = None
    sleep_mode: Annotated[
        bool, Meta(description="allow sleep: weights move to host memory and the GPU's memory is freed")
    ] = False
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1, description="seed of dummy weights")] = 0
    progress: Annotated[bool, Meta(description="show progress bars")] = True

    @property
    def model_name(self) -> str:
        """The Hugging Face id, or the name of the checkpoint's folder; `aengine-demo` for the embedded model."""
        if self.model is None:
            return "aengine-demo"
        return Path(self.model).resolve().name if Path(self.model).is_dir() else self.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names allowed in requests: `model_name`, the folder's path as it was given, its absolute path."""
        if self.model is None:
            return (self.model_name,)
        paths = (os.path.abspath(self.model),) if Path(self.model).is_dir() else ()
        return tuple(dict.fromkeys((self.model_name, self.model, self.model.rstrip("/"), *paths)))

    def lora_places(self) -> int:
        """Return the number of slots for adapters on the device; 0 without adapters."""
        if not self.lora and not self.lora_loading:
            return 0
        return self.max_loras or (_LORAS if self.lora_loading else min(len(self.lora), _LORAS))
