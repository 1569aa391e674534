"""Answers of several replicas are merged into one."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from aengine.ray_serve.all_replicas import merge, merge_metrics
from aengine.ray_serve.autoscaling import ScalingPolicy
from aengine.ray_serve.call import Head

TEXT = """\
# HELP aengine_requests_total Requests that ended.
# TYPE aengine_requests_total counter
aengine_requests_total %d.0
# HELP vllm:request_success_total Outputs that ended.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="a \\"b\\" {c}"} 3.0
# HELP aengine_first_seconds Time.
# TYPE aengine_first_seconds histogram
aengine_first_seconds_bucket{le="+Inf"} 1.0
aengine_first_seconds_count 1.0
aengine_first_seconds_sum 0.5
"""


def test_each_sample_has_its_replicas_name_and_families_are_together() -> None:
    text = merge_metrics({"a": TEXT % 1, "b": TEXT % 2})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families) == text.count("# TYPE") == 3
    values = {sample.labels["replica"]: sample.value for sample in families["aengine_requests"].samples}
    assert values == {"a": 1.0, "b": 2.0}
    assert {sample.labels["finished_reason"] for sample in families["vllm:request_success"].samples} == {'a "b" {c}'}
    assert len(families["aengine_first_seconds"].samples) == 6


def head(body: object, status: int = 200) -> Head:
    return Head(status, [(b"content-type", b"application/json"), (b"content-length", b"1")], json.dumps(body).encode())


def test_counts_add_up_and_the_length_is_right() -> None:
    answer = merge("/abort", {"a": head({"aborted": 1}), "b": head({"aborted": 2})})
    assert json.loads(answer.body) == {"aborted": 3}
    assert dict(answer.headers)[b"content-length"] == str(len(answer.body)).encode()
    loads = merge("/load", {"a": head({"server_load": 1}), "b": head({"server_load": 5})})
    assert json.loads(loads.body) == {"server_load": 6}


def test_a_refusal_is_passed_on() -> None:
    refused = head({"error": {}}, 400)
    assert merge("/abort", {"a": head({"aborted": 1}), "b": refused}) is refused


class Context:
    def __init__(self, replicas: int, **metrics: dict[str, float]) -> None:
        self.current_num_replicas = replicas
        self.aggregated_metrics = metrics


def test_as_many_engines_as_the_scarcest_resource_demands() -> None:
    demand = ScalingPolicy({"requests": 10, "kv_usage": 0.5})
    assert demand(Context(2, requests={"a": 30, "b": 10}, kv_usage={"a": 0.1, "b": 0.1})) == (4, {})
    assert demand(Context(2, requests={"a": 1, "b": 1}, kv_usage={"a": 1.0, "b": 0.5})) == (3, {})
    assert demand(Context(4, requests=dict.fromkeys("abcd", 1.0), kv_usage=dict.fromkeys("abcd", 0.0))) == (0.4, {})
    assert demand(Context(3)) == (3, {})
