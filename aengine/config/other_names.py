"""What other engines call the knobs, and what to do instead of theirs that do not exist here.

The names are vLLM's unless said otherwise. A value is the knob that means the same, or a sentence.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

_ALWAYS_ON = "is always done; leave it out"
_NOT_NEEDED = "has no counterpart and is not needed; leave it out"
_NO_IMAGES = "images are not there yet; leave it out"

OTHER_NAMES = {
    "attention_backend": "attention",
    "block_size": "page_size",
    "enable_log_requests": "access_log",
    "enable_sleep_mode": "sleep_mode",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "kv_events_config": "kv_events",
    "lora_modules": "lora",
    "max_cpu_loras": "lora_host_gib",
    "max_num_batched_tokens": "max_step_tokens",
    "num_gpu_blocks_override": "num_pages",
    "swap_space": "host_cache_gib",
    "timeout_keep_alive": "keep_alive_timeout",
    "tool_call_parser": "tool_format",
    "h11_max_incomplete_event_size": "max_header_bytes",
    # SGLang's
    "chunked_prefill_size": "max_step_tokens",
    "context_length": "max_model_len",
    "lora_paths": "lora",
    "max_running_requests": "max_num_seqs",
    "max_queued_requests": "max_queue",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_path": "model",
    "tp_size": "tensor_parallel_size",
    # llama.cpp's
    "ctx_size": "max_model_len",
    "parallel": "max_num_seqs",
}
# Switches: here the knob is on or off for the opposite word.
_OPPOSITES = {
    "enforce_eager": "cuda_graphs",
    "disable_cuda_graph": "cuda_graphs",
    "disable_radix_cache": "prefix_cache",
}
REMEDIES = {
    "compilation_config": _NOT_NEEDED,
    "cpu_offload_gb": "weights stay on the GPU; take a smaller format (quantization) or more GPUs",
    "dp": "replicas run on Ray Serve (serve run aengine.ray_serve:app replicas=N)",
    "data_parallel_size": "replicas run on Ray Serve (serve run aengine.ray_serve:app replicas=N)",
    "disable_log_requests": "requests are not logged unless access_log is on; leave it out",
    "disable_log_stats": "figures stand at /metrics and are not logged; leave it out",
    "no_enable_log_requests": "requests are not logged unless access_log is on; leave it out",
    "disable_frontend_multiprocessing": "there is one process; leave it out",
    "distributed_executor_backend": _NOT_NEEDED,
    "download_dir": "set the variable HF_HOME instead",
    "enable_expert_parallel": "experts are shared out by tensor_parallel_size; leave it out",
    "enable_reasoning": "thoughts are told apart by themselves; leave it out",
    "enable_server_load_tracking": _ALWAYS_ON,
    "generation_config": "the checkpoint's generation_config.json gives the defaults; leave it out",
    "guided_decoding_backend": _NOT_NEEDED,
    "hf_token": "set the variable HF_TOKEN instead",
    "hf_overrides": "edit the checkpoint's config.json instead",
    "kv_transfer_config": "KV goes to host memory and disk by host_cache_gib and disk_cache_dir",
    "limit_mm_per_prompt": _NO_IMAGES,
    "load_balancing": _NOT_NEEDED,
    "max_logprobs": "a request may ask for up to 20; leave it out",
    "max_seq_len_to_capture": _NOT_NEEDED,
    "mm_processor_kwargs": _NO_IMAGES,
    "n_gpu_layers": "all layers are on the GPU; leave it out",
    "ngl": "all layers are on the GPU; leave it out",
    "no_enable_chunked_prefill": "prompts are always read in chunks; leave it out",
    "num_scheduler_steps": _NOT_NEEDED,
    "override_generation_config": "edit the checkpoint's generation_config.json instead",
    "pipeline_parallel_size": "layers are not spread over GPUs; use tensor_parallel_size",
    "pp": "layers are not spread over GPUs; use tensor_parallel_size",
    "reasoning_parser": "thoughts are found from the chat template (reasoning=auto); leave it out",
    "rope_scaling": "edit the checkpoint's config.json instead",
    "runner": "what a model does follows from its folder; leave it out",
    "scheduling_policy": "requests with a priority are always ranked by it; leave it out",
    "speculative_config": "speculative decoding is not there yet; leave it out",
    "structured_outputs_config": _NOT_NEEDED,
    "task": "what a model does follows from its folder; leave it out",
    "tokenizer": "the tokenizer is the one in the model's folder; leave it out",
    "tokenizer_mode": "the tokenizer is the one in the model's folder; leave it out",
    "uvicorn_log_level": "the server is hypercorn; access_log turns on a line for each request",
}
_LIKENESS = 0.7  # share of common letters from which on a name is offered


def knob_meant(name: str, known: Collection[str]) -> tuple[str, bool] | None:
    """The knob among `known` that `name` means, and whether it is to be switched off; None: there is none.

    A name that switches something off is never taken for one that switches it on.
    """
    name = name.lower().replace("-", "_")
    for names, off in ((_OPPOSITES, True), (OTHER_NAMES, False)):
        if names.get(name) in known:
            return names[name], off
    off = name.startswith("no_")
    bare = name.removeprefix("no_")
    if bare.startswith(("enable_", "disable_")):
        switch, _, rest = bare.partition("_")
        return (rest, off != (switch == "disable")) if rest in known else None
    close = get_close_matches(bare, known, 1, _LIKENESS)
    return (close[0], off) if close else None


def remedy(name: str) -> str | None:
    """What to do instead of giving a knob of another engine that does not exist here."""
    return REMEDIES.get(name.lower().replace("-", "_"))
