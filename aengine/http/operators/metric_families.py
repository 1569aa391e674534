"""The engine's figures as metric families of prometheus-client, under our names and under vLLM's names.

vLLM's names come from its documentation (usage/metrics), including older names that dashboards still read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from aengine.latency import Histogram, Latencies
from aengine.types import AdapterInfo, DeviceMemory, Stats


def histogram_family(
    name: str, text: str, histogram: Histogram, labels: Mapping[str, str], most: float = inf
) -> HistogramMetricFamily:
    """Return the family of one histogram under one set of labels. Bounds above `most` are left out."""
    bounds = [*histogram.bounds, inf]
    family = HistogramMetricFamily(name, text, labels=[*labels])
    counts = zip(bounds, accumulate(histogram.counts), strict=True)
    buckets = [
        ("+Inf" if bound == inf else str(bound), count) for bound, count in counts if bound <= most or bound == inf
    ]
    family.add_metric([*labels.values()], buckets, histogram.total)
    return family


_GAUGES = {  # field of Stats -> name, help
    "running": ("aengine_requests_running", "Sequences that hold a row of the running batch."),
    "waiting": ("aengine_requests_waiting", "Choices that wait for a row."),
    "pages_total": ("aengine_kv_pages", "KV pages in the pool."),
    "pages_used": ("aengine_kv_pages_used", "KV pages held by running sequences."),
    "pages_cached": ("aengine_kv_pages_cached", "KV pages held by the prefix cache alone; evictable."),
    "pages_free": ("aengine_kv_pages_free", "KV pages that are free."),
    "kv_usage": ("aengine_kv_usage_ratio", "Share of the pool's pages that running sequences hold."),
    "hit_rate": ("aengine_prefix_hit_ratio", "Share of prompt tokens served from the prefix cache since start."),
}
_COUNTERS = {  # Prometheus appends _total
    "requests": ("aengine_requests", "Requests that ended, for any reason."),
    "steps": ("aengine_steps", "Steps of the engine."),
    "prompt_tokens": ("aengine_prompt_tokens", "Prompt tokens of requests."),
    "cached_tokens": ("aengine_cached_tokens", "Prompt tokens served from the prefix cache."),
    "computed_tokens": ("aengine_computed_tokens", "Tokens that went through the model."),
    "generated_tokens": ("aengine_generated_tokens", "Tokens generated."),
    "preemptions": ("aengine_preemptions", "Running sequences put back into the queue because pages were missing."),
}
_HISTOGRAMS = {  # field of Latencies
    "first_token": ("aengine_time_to_first_token_seconds", "From a request's arrival to its first token."),
    "inter_token": (
        "aengine_inter_token_latency_seconds",
        "Between two tokens of one output. Tokens that arrive together share the gap before them.",
    ),
    "whole": ("aengine_request_latency_seconds", "From a request's arrival to its last token, unless aborted."),
    "queued": ("aengine_request_queue_time_seconds", "From a request's arrival to its first step."),
    "prefill": ("aengine_request_prefill_seconds", "From a request's first step to its first token."),
    "decode": ("aengine_request_decode_seconds", "From a request's first token to its last."),
    "step_tokens": ("aengine_step_tokens", "Tokens that went through the model in a step."),
}
_TOKEN_HISTOGRAMS = {  # histograms that end at the context's length
    "prompt_tokens": ("aengine_request_prompt_tokens", "Tokens of a request's prompt."),
    "generated_tokens": ("aengine_request_generated_tokens", "Tokens generated for one output."),
}


def stats_families(stats: Stats) -> Iterator[Metric]:
    for field, (name, text) in _GAUGES.items():
        yield GaugeMetricFamily(name, text, value=getattr(stats, field))
    for field, (name, text) in _COUNTERS.items():
        yield CounterMetricFamily(name, text, value=getattr(stats, field))


def device_families(devices: list[DeviceMemory]) -> Iterator[Metric]:
    for field, text in (
        ("used", "Bytes of a GPU's memory in use, by all processes."),
        ("total", "Bytes of a GPU's memory."),
    ):
        family = GaugeMetricFamily(f"aengine_device_memory_{field}_bytes", text, labels=["device", "name"])
        for device in devices:
            family.add_metric([device.device, device.name], getattr(device, field))
        yield family


def latency_families(latencies: Latencies, context: int) -> Iterator[Metric]:
    for field, (name, text) in _HISTOGRAMS.items():
        yield histogram_family(name, text, getattr(latencies, field), {})
    for field, (name, text) in _TOKEN_HISTOGRAMS.items():
        yield histogram_family(name, text, getattr(latencies, field), {}, context)
    ended = CounterMetricFamily("aengine_outputs", "Outputs (n of a request) that ended.", labels=["finish_reason"])
    for reason, count in latencies.ended.items():
        ended.add_metric([reason], count)
    yield ended


def adapter_families(stats: Stats, adapters: Sequence[AdapterInfo]) -> Iterator[Metric]:
    """Yield the number of adapters, of places on the device, of loads and of evictions."""
    there = sum(adapter.on_device for adapter in adapters)
    size = sum(adapter.bytes for adapter in adapters)
    yield GaugeMetricFamily("aengine_adapters", "Adapters that requests may name.", value=len(adapters))
    yield GaugeMetricFamily("aengine_adapters_on_device", "Adapters whose weights are on the device.", value=there)
    yield GaugeMetricFamily(
        "aengine_adapter_places", "The number of adapters that fit on the device at once.", stats.adapter_places
    )
    yield GaugeMetricFamily("aengine_adapter_host_bytes", "Host memory that adapters take.", value=size)
    yield CounterMetricFamily("aengine_adapter_loads", "Adapters copied to the device.", stats.adapter_loads)
    yield CounterMetricFamily(
        "aengine_adapter_evictions",
        "Adapters removed from the device to make room for another one.",
        stats.adapter_evictions,
    )


def vllm_adapter_info(stats: Stats, adapters: Sequence[AdapterInfo]) -> Metric:
    """Return `vllm:lora_requests_info`. Its labels have the adapters' names; its value is the time."""
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters with running and with waiting requests; the value is the time in seconds.",
        labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    waiting = ",".join(adapter.name for adapter in adapters if adapter.waiting)
    running = ",".join(adapter.name for adapter in adapters if adapter.running)
    info.add_metric([str(stats.adapter_places), waiting, running], time.time())
    return info


def state_families(stats: Stats) -> Iterator[Metric]:
    """Yield the number of snapshots and of evictions."""
    yield GaugeMetricFamily(
        "aengine_state_snapshots",
        "Places for snapshots of linear attention's state.",
        stats.state_snapshots,
    )
    yield GaugeMetricFamily("aengine_state_snapshots_used", "State snapshots in use.", stats.state_snapshots_used)
    yield CounterMetricFamily(
        "aengine_state_snapshot_evictions",
        "State snapshots removed to make room for another one.",
        stats.state_snapshot_evictions,
    )


def tier_families(stats: Stats) -> Iterator[Metric]:
    """Yield cached tokens by tier, the bytes in tiers below the pool, and the pages that were copied."""
    found = CounterMetricFamily(
        "aengine_tier_cached_tokens", "Prompt tokens served from the prefix cache, by tier.", labels=["tier"]
    )
    below = stats.cached_host_tokens + stats.cached_disk_tokens
    found.add_metric(["device"], stats.cached_tokens - below)
    found.add_metric(["host"], stats.cached_host_tokens)
    found.add_metric(["disk"], stats.cached_disk_tokens)
    yield found
    size = stats.host_page_bytes
    held = GaugeMetricFamily("aengine_tier_bytes", "Bytes of KV pages in the tiers below the pool.", labels=["tier"])
    held.add_metric(["host"], stats.host_pages * size)
    held.add_metric(["disk"], stats.disk_bytes)
    yield held
    yield GaugeMetricFamily(
        "aengine_host_cache_bytes", "Host memory that is kept for KV pages.", stats.host_pages_total * size
    )
    stores = CounterMetricFamily("aengine_tier_stores", "KV pages copied to a lower tier.", labels=["tier"])
    stores.add_metric(["host"], stats.host_stores)
    stores.add_metric(["disk"], stats.disk_stores)
    yield stores
    loads = CounterMetricFamily("aengine_tier_loads", "KV pages loaded from a lower tier.", labels=["tier"])
    loads.add_metric(["host"], stats.host_loads)
    loads.add_metric(["disk"], stats.disk_loads)
    yield loads
    yield CounterMetricFamily(
        "aengine_host_cache_misses", "KV pages evicted from the pool before they were copied.", stats.host_misses
    )


def window_families(stats: Stats) -> Iterator[Metric]:
    """Yield the number of pages, and of used and cached ones."""
    yield GaugeMetricFamily("aengine_window_pages", "Pages of layers with a sliding window.", stats.window_pages)
    yield GaugeMetricFamily("aengine_window_pages_used", "Window pages of running requests.", stats.window_pages_used)
    yield GaugeMetricFamily(
        "aengine_window_pages_cached", "Window pages held by the prefix cache alone.", stats.window_pages_cached
    )


def speculation_families(stats: Stats) -> Iterator[Metric]:
    """Yield the counts of drafts, labelled with the proposer, and the mean accepted length."""
    for name, value, text in (
        ("drafted_tokens", stats.drafted_tokens, "Drafts that steps verified."),
        ("accepted_tokens", stats.accepted_tokens, "Drafts that became tokens of an output."),
        ("verifications", stats.verified_rows, "Sequences with drafts, over all steps."),
    ):
        counter = CounterMetricFamily(f"aengine_speculation_{name}", text, labels=["proposer"])
        counter.add_metric([stats.speculation], value)
        yield counter
    by_position = CounterMetricFamily(
        "aengine_speculation_accepted_tokens_by_position",
        "Accepted drafts by their position among the drafts of a step; 0 is the first.",
        labels=["proposer", "position"],
    )
    for position, count in enumerate(stats.accepted_by_position):
        by_position.add_metric([stats.speculation, str(position)], count)
    yield by_position
    mean = GaugeMetricFamily(
        "aengine_speculation_mean_accepted_length",
        "Tokens that a sequence gets from a step that verifies drafts, since start: accepted / verifications + 1.",
        labels=["proposer"],
    )
    mean.add_metric([stats.speculation], stats.mean_accepted_length)
    yield mean


_VLLM_GAUGES = {  # name without vllm: -> field of Stats, help
    "num_requests_running": ("running", "Sequences that hold a row of the running batch."),
    "num_requests_waiting": ("waiting", "Choices that wait for a row."),
    "kv_cache_usage_perc": ("kv_usage", "Share of the KV pages in use; 1 is all of them."),
    "gpu_cache_usage_perc": ("kv_usage", "The older name of vllm:kv_cache_usage_perc."),
}
_VLLM_COUNTERS = {  # Prometheus appends _total
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests."),
    "generation_tokens": ("generated_tokens", "Tokens generated."),
    "num_preemptions": ("preemptions", "Running sequences put back into the queue."),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "gpu_prefix_cache_queries": ("prompt_tokens", "The older name of vllm:prefix_cache_queries."),
    "gpu_prefix_cache_hits": ("cached_tokens", "The older name of vllm:prefix_cache_hits."),
}
_VLLM_HISTOGRAMS = {  # name -> field of Latencies, help
    "time_to_first_token_seconds": ("first_token", "From a request's arrival to its first token."),
    "inter_token_latency_seconds": ("inter_token", "Between two tokens of one output."),
    "time_per_output_token_seconds": ("inter_token", "The older name of vllm:inter_token_latency_seconds."),
    "e2e_request_latency_seconds": ("whole", "From a request's arrival to its last token."),
    "request_queue_time_seconds": ("queued", "From a request's arrival to its first step."),
    "request_inference_time_seconds": ("inference", "From a request's first step to its last token."),
    "request_prefill_time_seconds": ("prefill", "From a request's first step to its first token."),
    "request_decode_time_seconds": ("decode", "From a request's first token to its last."),
    "request_time_per_output_token_seconds": ("mean_inter_token", "The mean time between a request's tokens."),
    "request_params_n": ("choices", "The n of requests."),
    "iteration_tokens_total": ("step_tokens", "Tokens that went through the model in a step."),
}
_VLLM_TOKEN_HISTOGRAMS = {  # histograms that end at the context's length
    "request_prompt_tokens": ("prompt_tokens", "Tokens of a request's prompt."),
    "request_prefill_kv_computed_tokens": (
        "computed_prompt_tokens",
        "Tokens of a request's prompt that were not in the prefix cache.",
    ),
    "request_generation_tokens": ("generated_tokens", "Tokens generated for one output."),
    "request_max_num_generation_tokens": ("most_generated_tokens", "Tokens generated for a request's longest output."),
    "request_params_max_tokens": ("max_tokens", "The most tokens that an output could have."),
}


_VLLM_SPECULATION = {  # counters, only if a proposer runs
    "spec_decode_num_drafts": ("verified_rows", "Sequences with drafts, over all steps."),
    "spec_decode_num_draft_tokens": ("drafted_tokens", "Drafts that steps verified."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafts that became tokens of an output."),
}


def vllm_families(stats: Stats, latencies: Latencies, model: str, context: int) -> Iterator[Metric]:
    """Yield the families, each labelled as vLLM does with one engine. context: the longest prompt + output."""
    labels = {"model_name": model, "engine": "0"}
    names, values = [*labels], [*labels.values()]
    for name, (field, text) in _VLLM_GAUGES.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
        gauge.add_metric(values, getattr(stats, field))
        yield gauge
    drafts = stats.speculation != "off"
    for name, (field, text) in (_VLLM_COUNTERS | (_VLLM_SPECULATION if drafts else {})).items():
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=names)
        counter.add_metric(values, getattr(stats, field))
        yield counter
    if drafts:
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by position.", labels=[*names, "position"]
        )
        for position, count in enumerate(stats.accepted_by_position):
            by_position.add_metric([*values, str(position)], count)
        yield by_position
    for name, (field, text) in _VLLM_HISTOGRAMS.items():
        yield histogram_family(f"vllm:{name}", text, getattr(latencies, field), labels)
    for name, (field, text) in _VLLM_TOKEN_HISTOGRAMS.items():
        yield histogram_family(f"vllm:{name}", text, getattr(latencies, field), labels, context)
    ended = CounterMetricFamily("vllm:request_success", "Outputs that ended.", labels=[*names, "finished_reason"])
    for reason, count in latencies.ended.items():
        ended.add_metric([*values, reason], count)
    yield ended
    cache = {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.pages_total), "engine": "0"}
    info = InfoMetricFamily("vllm:cache_config", "The KV pool: tokens in a page, and pages.", labels=())
    info.add_metric((), cache)
    yield info
