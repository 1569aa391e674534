"""A step hands out the residual stream before given layers, as transformers computes it."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aengine.kernels.collective.base import PendingSum
from aengine.kernels.linear.base import Norm
from aengine.model.decoder import Decoder
from aengine.model.drafting.base import TapStates
from tests.model.checkpoints import write_checkpoint
from tests.model.drafting.steps import Sequences
from tests.model.ranks import Counted, InPieces, Ranks

TOKENS = [5, 99, 3, 3, 64, 17, 80, 2, 41]
SIZES = {"num_hidden_layers": 3}


class Late(InPieces):
    """A collective whose sums of pieces reach the residual only when they are finished, as on GPUs."""

    def begin_sum(self, part: Tensor, residual: Tensor) -> PendingSum:
        return LateSum(self.sum(part, residual), self.pending)


class LateSum:
    def __init__(self, total: Tensor, queue: deque[PendingSum]) -> None:
        self.tokens = len(total)
        self._total = total
        self._queue = queue
        queue.append(self)

    def finish(self, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> None:
        assert self._queue.popleft() is self
        residual.copy_(self._total)
        if norm is not None and normed is not None:
            normed.copy_(norm(residual))


def run(decoder: Decoder, layers: tuple[int, ...], wanted: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return the taps of one step over all tokens, [tokens, layers, hidden], and the hidden states that are wanted."""
    hidden = decoder.config.hidden_size
    taps = TapStates(layers, torch.full((len(TOKENS), len(layers) * hidden), float("nan")))
    spans = [range(len(TOKENS))]
    prompt = Sequences(decoder, 1)
    positions, batch = prompt.batch(spans)
    rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
    states = prompt.states(spans, positions)
    with torch.inference_mode():
        returned = decoder.forward(torch.tensor(TOKENS), positions, batch, prompt.kv, rows, states=states, taps=taps)
    return taps.states.unflatten(1, (len(layers), hidden)), returned


def expected(model: PreTrainedModel, layers: tuple[int, ...]) -> Tensor:
    """Return the input of each layer, and the input of the final norm after the last layer."""
    inputs: list[Tensor] = []
    last = model.model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    with torch.no_grad():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    last.remove()
    every = [*(one[0] for one in states[:-1]), inputs[0]]
    return torch.stack([every[layer] for layer in layers], dim=1)


@pytest.fixture(scope="module", params=["llama2", "qwen3-5"])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, folder, **SIZES)
    return Ranks(folder, 1).decoders[0], model


@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 1, 2, 3)])
def test_the_residual_stream_before_layers(layers: tuple[int, ...], subject: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = subject
    taps, _ = run(decoder, layers)
    torch.testing.assert_close(taps, expected(model, layers), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layers", [(1, 2), (2, 3)])
@pytest.mark.parametrize("wanted", [[8], [2, 7], []])
def test_all_tokens_are_tapped_if_few_are_wanted(
    layers: tuple[int, ...], wanted: list[int], subject: tuple[Decoder, PreTrainedModel]
) -> None:
    decoder, model = subject
    taps, hidden = run(decoder, layers, wanted)
    torch.testing.assert_close(taps, expected(model, layers), atol=1e-4, rtol=1e-4)
    _, every = run(decoder, (1,))
    torch.testing.assert_close(hidden, every[wanted])


def test_a_layer_that_the_model_does_not_have_is_refused(subject: tuple[Decoder, PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match="not all from 0 to 3"):
        run(subject[0], (1, 4))


@pytest.mark.parametrize("collective", [Counted, Late])
def test_ranks_tap_whole_sums(collective: type[Counted], tmp_path: Path) -> None:
    """Sums of some tokens may still be running when a layer begins."""
    model = write_checkpoint("llama2", tmp_path, **SIZES)
    layers = (0, 1, 3)
    for taps, _ in Ranks(tmp_path, 2, collective=collective).each(lambda decoder: run(decoder, layers)):
        torch.testing.assert_close(taps, expected(model, layers), atol=1e-4, rtol=1e-4)
