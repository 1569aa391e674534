"""Names of knobs in other engines, each with the knob here or with advice.

The names are vLLM's unless a comment says otherwise.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import NamedTuple

_MIN_SIMILARITY = 0.7  # a name is suggested if at least this share of its letters agrees
_REPLICAS = "replicas run on Ray Serve (serve run aengine.ray_serve:app replicas=N)"
_LAYERS = "layers are not spread over GPUs; use tensor_parallel_size"
_SPECULATION = (
    "write speculation (mtp, ngram, eagle3=PATH, dflash=PATH, draft=PATH) and draft_tokens, "
    "the most tokens that a step drafts"
)
_CHECKPOINT = "the model's folder says what the model does; leave it out"
_TOKENIZER = "the tokenizer is the one in the model's folder; leave it out"
_EXPERTS = "tensor_parallel_size also divides the experts; leave it out"


class OtherName(NamedTuple):
    """The meaning of one name of another engine."""

    knob: str = ""  # the knob with the same meaning; empty if there is none
    remedy: str = ""  # without a knob: what to do instead
    switches_off: bool = False  # the knob has the opposite meaning
    # `aengine serve` and its files accept the name: as the knob, or without any effect if there is no knob.
    is_accepted: bool = False


def _knob(name: str, *, accepted: bool = False) -> OtherName:
    return OtherName(knob=name, is_accepted=accepted)


def _opposite(name: str) -> OtherName:
    return OtherName(knob=name, switches_off=True)


def _no_knob(remedy: str) -> OtherName:
    return OtherName(remedy=remedy)


def _no_effect(reason: str) -> OtherName:
    return OtherName(remedy=f"{reason}; leave it out", is_accepted=True)


_NOT_NEEDED = _no_knob("has no counterpart and is not needed; leave it out")
_ALWAYS_ON = _no_effect("is always done")
_NO_IMAGES = _no_knob("the model decides how it takes images; leave it out, or set images to off")
_NO_REQUEST_LOG = _no_effect("requests are not logged unless access_log is on")
_THOUGHTS = _no_knob("thoughts are found from the chat template (reasoning=auto); leave it out")
_ANY_CORS = _no_knob("allowed_origins may use every method and header of the API; leave it out")

OTHER_NAMES = {
    "allowed_headers": _ANY_CORS,
    "allowed_methods": _ANY_CORS,
    "api_key": _knob("api_keys", accepted=True),
    "async_scheduling": _knob("lookahead", accepted=True),
    "attention": _no_knob("kernels are chosen by the device; leave it out, or set kernels to torch"),
    "attention_backend": _no_knob("kernels are chosen by the device; leave it out, or set kernels to torch"),
    "block_size": _knob("page_size"),
    "code_revision": _no_knob("code of a checkpoint is never run; leave it out"),
    "compilation_config": _NOT_NEEDED,
    "cpu_offload_gb": _no_knob("weights stay on the GPU; take a smaller format (quantization) or more GPUs"),
    "cuda_graph_sizes": _NOT_NEEDED,
    "cudagraph_capture_sizes": _NOT_NEEDED,
    "data_parallel_size": _no_knob(_REPLICAS),
    "disable_frontend_multiprocessing": _no_knob("there is one process; leave it out"),
    "disable_log_requests": _NO_REQUEST_LOG,
    "disable_log_stats": _no_effect("/metrics has the figures, which are not logged"),
    "disable_uvicorn_access_log": _NO_REQUEST_LOG,
    "distributed_executor_backend": _NOT_NEEDED,
    "download_dir": _no_knob("set the variable HF_HOME instead"),
    "dp": _no_knob(_REPLICAS),
    "enable_auto_tool_choice": _ALWAYS_ON,
    "enable_chunked_prefill": _ALWAYS_ON,
    "enable_expert_parallel": _no_knob(_EXPERTS),
    "enable_log_requests": _knob("access_log"),
    "enable_lora": _no_effect("adapters are on as soon as lora names one"),
    "enable_prefix_caching": _knob("prefix_cache", accepted=True),
    "enable_prompt_tokens_details": _ALWAYS_ON,
    "enable_reasoning": _no_knob("thoughts are always separated from the answer; leave it out"),
    "enable_server_load_tracking": _ALWAYS_ON,
    "enable_sleep_mode": _knob("sleep_mode", accepted=True),
    "enable_tokenizer_info_endpoint": _knob("tokenizer_info"),
    "enforce_eager": _opposite("cuda_graphs"),
    "ep": _no_knob(_EXPERTS),
    "generation_config": _no_knob("the checkpoint's generation_config.json gives the defaults; leave it out"),
    "guided_decoding_backend": _NOT_NEEDED,
    "h11_max_incomplete_event_size": _knob("max_header_bytes"),
    "hf_overrides": _no_knob("edit the checkpoint's config.json instead"),
    "hf_token": _no_knob("set the variable HF_TOKEN instead"),
    "kv_cache_memory_bytes": _knob("kv_cache_gib"),
    "kv_cache_metrics": _no_knob("/metrics always has the figures of the cache; leave it out"),
    "kv_events_config": _knob("kv_events"),
    "kv_offloading_size": _knob("host_cache_gib"),
    "kv_transfer_config": _no_knob("KV goes to host memory and disk by host_cache_gib and disk_cache_dir"),
    "language_model_only": _no_knob("set images to off"),
    "limit_mm_per_prompt": _NO_IMAGES,
    "lora_modules": _knob("lora"),
    "mamba_cache_dtype": _knob("state_dtype"),
    "mamba_ssm_cache_dtype": _knob("state_dtype"),
    "max_cpu_loras": _knob("lora_host_gib"),
    "max_cudagraph_capture_size": _NOT_NEEDED,
    "max_log_len": _no_knob("prompts are never logged; leave it out"),
    "max_logprobs": _no_knob("a request may ask for up to 20; leave it out"),
    "max_num_batched_tokens": _knob("max_step_tokens"),
    "max_seq_len_to_capture": _NOT_NEEDED,
    "mm_processor_kwargs": _NO_IMAGES,
    "no_enable_chunked_prefill": _no_knob("prompts are always read in chunks; leave it out"),
    "no_enable_log_requests": _NO_REQUEST_LOG,
    "num_gpu_blocks_override": _knob("num_pages"),
    "num_scheduler_steps": _NOT_NEEDED,
    "num_speculative_tokens": _knob("draft_tokens"),
    "override_generation_config": _no_knob("edit the checkpoint's generation_config.json instead"),
    "pipeline_parallel_size": _no_knob(_LAYERS),
    "pp": _no_knob(_LAYERS),
    "q": _knob("quantization", accepted=True),
    "reasoning_config": _THOUGHTS,
    "reasoning_parser": _THOUGHTS,
    "rope_scaling": _no_knob("edit the checkpoint's config.json instead"),
    "runner": _no_knob(_CHECKPOINT),
    "scheduling_policy": _no_knob("requests with a priority are always ranked by it; leave it out"),
    "sc": _no_knob(_SPECULATION),
    "skip_tokenizer_init": _no_knob(_TOKENIZER),
    "speculative_config": _no_knob(_SPECULATION),
    "speculative_model": _no_knob(_SPECULATION),
    "ssl_cert_reqs": _no_knob("clients are not asked for certificates; leave it out"),
    "structured_outputs_config": _NOT_NEEDED,
    "swap_space": _knob("host_cache_gib"),
    "task": _no_knob(_CHECKPOINT),
    "timeout_keep_alive": _knob("keep_alive_timeout"),
    "tokenizer": _no_knob(_TOKENIZER),
    "tokenizer_mode": _no_knob(_TOKENIZER),
    "tokenizer_revision": _no_knob(_TOKENIZER),
    "tool_call_parser": _knob("tool_format"),
    "tp": _knob("tensor_parallel_size", accepted=True),
    "trust_remote_code": _no_effect("code of a checkpoint is never run, and known families need none"),
    "uvicorn_log_level": _no_knob("the server is hypercorn; access_log turns on a line for each request"),
    "worker_cls": _NOT_NEEDED,
    # SGLang's
    "chunked_prefill_size": _knob("max_step_tokens"),
    "context_length": _knob("max_model_len"),
    "cuda_graph_max_bs": _NOT_NEEDED,
    "disable_cuda_graph": _opposite("cuda_graphs"),
    "disable_radix_cache": _opposite("prefix_cache"),
    "dist_timeout": _NOT_NEEDED,
    "dp_size": _no_knob(_REPLICAS),
    "ep_size": _no_knob(_EXPERTS),
    "grammar_backend": _NOT_NEEDED,
    "hicache_size": _knob("host_cache_gib"),
    "load_balancing": _NOT_NEEDED,
    "lora_paths": _knob("lora"),
    "max_queued_requests": _knob("max_queue"),
    "max_running_requests": _knob("max_num_seqs"),
    "max_total_tokens": _knob("num_pages"),
    "mem_fraction_static": _knob("gpu_memory_utilization"),
    "model_path": _knob("model"),
    "speculative_algorithm": _no_knob(
        "write speculation: mtp for NEXTN, ngram for NGRAM, eagle3=PATH for EAGLE3, dflash=PATH for DFLASH, draft=PATH "
        "for STANDALONE"
    ),
    "speculative_draft_model_path": _no_knob("write the path into speculation: eagle3=PATH, dflash=PATH or draft=PATH"),
    "speculative_eagle_topk": _no_knob("drafts are chains, as with 1; leave it out"),
    "speculative_num_draft_tokens": _no_knob("write draft_tokens, which counts drafts alone: one less"),
    "speculative_num_steps": _knob("draft_tokens"),
    "tokenizer_path": _no_knob(_TOKENIZER),
    "tp_size": _knob("tensor_parallel_size"),
    # llama.cpp's
    "ctx_size": _knob("max_model_len"),
    "draft_max": _knob("draft_tokens"),
    "model_draft": _no_knob("write the path into speculation: draft=PATH"),
    "spec_type": _no_knob(_SPECULATION),
    "n_gpu_layers": _no_knob("all layers are on the GPU; leave it out"),
    "ngl": _no_knob("all layers are on the GPU; leave it out"),
    "parallel": _knob("max_num_seqs"),
}


def nearest_knob(name: str, known: Collection[str]) -> tuple[str, bool] | None:
    """Return the knob among `known` that `name` probably means, and whether `name` switches it off.

    A name that switches something off is never taken for one that switches it on. Returns None if no
    knob is similar.
    """
    name = _normal(name)
    other = OTHER_NAMES.get(name)
    if other is not None and other.knob in known:
        return other.knob, other.switches_off
    off = name.startswith("no_")
    bare = name.removeprefix("no_")
    if bare.startswith(("enable_", "disable_")):
        switch, _, rest = bare.partition("_")
        return (rest, off != (switch == "disable")) if rest in known else None
    close = get_close_matches(bare, known, 1, _MIN_SIMILARITY)
    return (close[0], off) if close else None


def remedy(name: str) -> str:
    """Return the advice for a knob of another engine that does not exist here; empty if the name is unknown."""
    other = OTHER_NAMES.get(_normal(name))
    return "" if other is None else other.remedy


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")
