"""Rows of every kind of draw."""

from __future__ import annotations

from aengine.requests.sampling_params import SamplingParams

VOCAB = 48

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, min_p=0.1),
    SamplingParams(temperature=0.8, top_p=0.7),
    SamplingParams(temperature=0.8, top_k=3, logprobs=2),
    SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5),
]
