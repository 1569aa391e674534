"""Aliases of the metrics under vLLM's names, for routers, autoscalers and dashboards that know those alone.

The names are those of vLLM's documentation of its metrics (usage/metrics), with some that it has since renamed and
others still read.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from aengine.http.endpoints.operators.metrics.families import histogram_family
from aengine.latency import Latencies
from aengine.types import Stats

_GAUGES = {  # without vllm: -> field of Stats, help
    "num_requests_running": ("running", "Sequences that hold a row of the running batch."),
    "num_requests_waiting": ("waiting", "Choices that wait for a row."),
    "kv_cache_usage_perc": ("kv_usage", "Share of the KV pages in use; 1 is all of them."),
    "gpu_cache_usage_perc": ("kv_usage", "The older name of vllm:kv_cache_usage_perc."),
}
_COUNTERS = {  # Prometheus appends _total
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests."),
    "generation_tokens": ("generated_tokens", "Tokens generated."),
    "num_preemptions": ("preemptions", "Running sequences put back into the queue."),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found there."),
    "gpu_prefix_cache_queries": ("prompt_tokens", "The older name of vllm:prefix_cache_queries."),
    "gpu_prefix_cache_hits": ("cached_tokens", "The older name of vllm:prefix_cache_hits."),
}
_HISTOGRAMS = {  # -> field of Latencies, help
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
_TOKEN_HISTOGRAMS = {  # the same, of no more tokens than a context has
    "request_prompt_tokens": ("prompt_tokens", "Tokens of a request's prompt."),
    "request_prefill_kv_computed_tokens": ("computed_prompt_tokens", "Of these, those not in the prefix cache."),
    "request_generation_tokens": ("generated_tokens", "Tokens generated for one output."),
    "request_max_num_generation_tokens": ("most_generated_tokens", "Those of a request's longest output."),
    "request_params_max_tokens": ("max_tokens", "Tokens that an output could have had at most."),
}


def vllm_families(stats: Stats, latencies: Latencies, model: str, context: int) -> Iterator[Metric]:
    """Yield the families, each labelled as vLLM does with one engine. context: the longest prompt + output."""
    labels = {"model_name": model, "engine": "0"}
    names, values = [*labels], [*labels.values()]
    for name, (field, text) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
        gauge.add_metric(values, getattr(stats, field))
        yield gauge
    for name, (field, text) in _COUNTERS.items():
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=names)
        counter.add_metric(values, getattr(stats, field))
        yield counter
    for name, (field, text) in _HISTOGRAMS.items():
        yield histogram_family(f"vllm:{name}", text, getattr(latencies, field), labels)
    for name, (field, text) in _TOKEN_HISTOGRAMS.items():
        yield histogram_family(f"vllm:{name}", text, getattr(latencies, field), labels, context)
    ended = CounterMetricFamily("vllm:request_success", "Outputs that ended.", labels=[*names, "finished_reason"])
    for reason, count in latencies.ended.items():
        ended.add_metric([*values, reason], count)
    yield ended
    cache = {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.pages_total), "engine": "0"}
    info = InfoMetricFamily("vllm:cache_config", "The KV pool: tokens in a page, and pages.", labels=())
    info.add_metric((), cache)
    yield info
