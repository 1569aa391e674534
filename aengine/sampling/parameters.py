"""Sampling parameters of the rows. The host chooses stages by them; the stages read them on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling.noise import split_seed
from aengine.sampling.upload import upload
from aengine.step_plan import NewRow

# Bits for the stages that a row needs in addition to an argmax.
NOISE = 1
FILTER = 2  # top_k or top_p
MIN_P = 4
BIAS = 8
MIN_TOKENS = 16
PENALTY = 32
LOGPROBS = 64
BANNED = 128
GRAMMAR = 256
ALLOWED = 512

_TOP_P_OFF = 2.0  # above any share of the probability
_LEAST_REPETITION = 1e-30  # logits are divided by it, and a smaller divisor would overflow float32
_INT32_MAX = 2**31 - 1
_COLUMNS = 10


class ParameterColumns:
    """Views of the parameters of draws or of all rows, each [draws, 1] or [rows, 1]; float32 unless noted."""

    def __init__(self, table: Tensor) -> None:
        floats = table.view(torch.float32)
        self.top_k = table[:, 0:1]  # int32
        self.seed_low = table[:, 1:2]  # int32
        self.seed_high = table[:, 2:3]  # int32
        self.min_position = table[:, 3:4]  # int32; stop ids are masked at lower positions
        self.temperature = floats[:, 4:5]
        self.top_p = floats[:, 5:6]
        self.log_min_p = floats[:, 6:7]
        self.repetition = floats[:, 7:8]
        self.presence = floats[:, 8:9]
        self.frequency = floats[:, 9:10]


class RowParameters:
    """A table of parameters on the device, [rows, columns]. Integers and floats share it, so one upload is enough."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._table = torch.zeros((max_rows, _COLUMNS), dtype=torch.int32, device=device)
        self.of_all = ParameterColumns(self._table)
        self.needs = [0] * max_rows  # bits of the stages
        self.top_k = [vocab_size] * max_rows  # vocab_size: no top_k
        self.logprobs = [0] * max_rows  # number of candidates to return; only valid with LOGPROBS

    def set_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Replace the parameters of the given rows."""
        cells = np.empty((len(new_rows), _COLUMNS + 1), dtype=np.int32)
        floats = cells.view(np.float32)
        for i, new in enumerate(new_rows):
            params = new.params
            top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
            self.top_k[new.row] = top_k
            self.logprobs[new.row] = params.logprobs or 0
            self.needs[new.row] = self._needs(params, top_k) | (BANNED if new.banned else 0)
            cells[i, :4] = (top_k, *split_seed(new.seed), min(new.prompt_len + params.min_tokens, _INT32_MAX))
            floats[i, 4:10] = (
                params.temperature if self.needs[new.row] & NOISE else 0.0,  # top_k=1 is an argmax too
                params.top_p if params.top_p < 1 else _TOP_P_OFF,
                math.log(params.min_p) if params.min_p > 0 else -math.inf,
                max(params.repetition_penalty, _LEAST_REPETITION),
                params.presence_penalty,
                params.frequency_penalty,
            )
            cells[i, 10] = new.row
        sent = upload(cells, self._device)
        self._table.index_copy_(0, sent[:, 10].long(), sent[:, :10])

    def pick(self, rows: Tensor) -> ParameterColumns:
        """Return the parameters of rows [draws] int64."""
        return ParameterColumns(self._table.index_select(0, rows))

    def _needs(self, params: SamplingParams, top_k: int) -> int:
        needs = 0
        if params.temperature > 0 and top_k > 1:
            needs |= NOISE
            if params.top_p < 1 or top_k < self._vocab_size:
                needs |= FILTER
            if params.min_p > 0:
                needs |= MIN_P
        if params.logit_bias:
            needs |= BIAS
        if params.min_tokens > 0:
            needs |= MIN_TOKENS
        if params.penalized:
            needs |= PENALTY
        if params.logprobs is not None:
            needs |= LOGPROBS
        if params.structured is not None:
            needs |= GRAMMAR
        if params.allowed_token_ids is not None:
            needs |= ALLOWED
        return needs
