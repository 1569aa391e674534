"""Speculation in `GET /metrics`."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.fake_engine import IDLE, FakeEngine
from tests.http.serving import serving

pytestmark = pytest.mark.anyio


DRAFTING = msgspec.structs.replace(
    IDLE,
    speculation="mtp",
    drafted_tokens=300,
    accepted_tokens=160,
    verified_rows=100,
    accepted_by_position=(90, 50, 20),
)


async def test_figures_of_speculation() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        assert "speculation" not in (await server.client.get("/metrics")).text
        engine.numbers = DRAFTING
        text = (await server.client.get("/metrics")).text
    found = {
        (sample.name.removeprefix("aengine_speculation_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "speculation" in sample.name
    }
    assert {key: value for key, value in found.items() if not key[0].endswith("_created")} == {
        ("drafted_tokens_total", "mtp"): 300,
        ("accepted_tokens_total", "mtp"): 160,
        ("verifications_total", "mtp"): 100,
        ("accepted_tokens_by_position_total", "0", "mtp"): 90,
        ("accepted_tokens_by_position_total", "1", "mtp"): 50,
        ("accepted_tokens_by_position_total", "2", "mtp"): 20,
        ("mean_accepted_length", "mtp"): pytest.approx(2.6),
    }


async def test_vllms_names_of_speculation() -> None:
    engine = FakeEngine()
    async with serving(engine, served_model_name="mine", vllm_metrics=True) as server:
        assert "spec_decode" not in (await server.client.get("/metrics")).text
        engine.numbers = DRAFTING
        text = (await server.client.get("/metrics")).text
    for line in (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="mine"} 100.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="mine"} 300.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="mine"} 160.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="mine",position="1"} 50.0',
    ):
        assert line in text


async def test_before_the_first_verification_the_accepted_length_is_zero() -> None:
    engine = FakeEngine()
    engine.numbers = msgspec.structs.replace(IDLE, speculation="ngram")
    async with serving(engine) as server:
        text = (await server.client.get("/metrics")).text
    assert 'aengine_speculation_mean_accepted_length{proposer="ngram"} 0.0' in text
