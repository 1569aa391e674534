from __future__ import annotations

import pytest
import torch
from torch import Tensor

likeliest = pytest.importorskip("aengine.kernels.draw.likeliest")
pytestmark = pytest.mark.gpu

SHAPES = [
    pytest.param(3, 300, 20, id="tiny"),
    pytest.param(2, 9000, 20, id="tiny-pieces"),
    pytest.param(4, 21, 20, id="tiny-one-group"),
    pytest.param(4, 130, 7, id="tiny-few-groups"),
    (1, 151_936, 20),
    (256, 151_936, 5),
    (64, 262_208, 20),
]


def reference(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute in float64, with the lower id first among equals."""
    logprobs = logits.double().log_softmax(dim=-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return logprobs.gather(1, token_ids[:, None])[:, 0], order, logprobs.gather(1, order)


def check(logits: Tensor, k: int, draws: Tensor | None = None) -> None:
    device = logits.device
    token_ids = torch.randint(logits.shape[1], (len(logits),), device=device)
    asking = torch.arange(len(logits), device=device) if draws is None else draws
    found = likeliest.likeliest(logits, asking, token_ids, k)
    for mine, theirs in zip(found, reference(logits, token_ids, k), strict=True):
        wanted = torch.zeros_like(theirs)
        wanted[asking] = theirs[asking]
        if mine.is_floating_point():
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-6, atol=1e-5)
        else:
            assert torch.equal(mine, wanted)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("rows", "vocab", "k"), SHAPES)
def test_the_likeliest_equal_those_of_a_stable_sort(
    rows: int, vocab: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    check((torch.randn(rows, vocab, device=device) * 3).to(dtype), k)


def test_other_draws_get_zeros_tiny(device: torch.device) -> None:
    for k in (0, 1, 3, 20):
        check(torch.randn(5, 700, device=device), k, torch.tensor([4, 1], device=device))
        check(torch.randn(5, 700, device=device), k, torch.empty(0, dtype=torch.int64, device=device))


@pytest.mark.parametrize("k", [1, 6, 20])
def test_among_equals_the_lowest_ids_come_first_tiny(k: int, device: torch.device) -> None:
    """In any groups: few values, all equal, and equals in more groups than are picked."""
    torch.manual_seed(1)
    check(torch.randn(3, 2000, device=device).round(), k)
    check(torch.zeros(2, 2000, device=device), k)
    spread = torch.full((1, 4000), -5.0, device=device)
    spread[0, 63::64] = 2.0
    check(spread, k)


def test_masked_tokens_and_large_logits_are_harmless_tiny(device: torch.device) -> None:
    """Few tokens above -inf, whole pieces at -inf, and logits whose exponentials overflow."""
    logits = torch.randn(3, 9000, device=device) * 50 + 300
    logits[0, 40:] = -torch.inf
    logits[1, :8970] = -torch.inf
    check(logits, 20)


def test_a_row_is_the_same_in_every_batch_tiny(device: torch.device) -> None:
    torch.manual_seed(2)
    logits, token_ids = torch.randn(6, 5000, device=device), torch.arange(6, device=device)
    everyone = torch.arange(6, device=device)
    together = likeliest.likeliest(logits, everyone, token_ids, 20)
    alone = likeliest.likeliest(logits[3:4], everyone[:1], token_ids[3:4], 4)
    for many, one in zip(together, alone, strict=True):
        assert torch.equal(many[3:4].reshape(1, -1)[:, : one.numel()], one.reshape(1, -1))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_invalid_rows_do_not_affect_others_tiny(device: torch.device) -> None:
    logits = torch.randn(5, 700, device=device)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2, 4] = torch.inf
    logits[3] = -torch.inf
    token_ids = torch.zeros(5, dtype=torch.int64, device=device)
    sampled, top_ids, top = likeliest.likeliest(logits, torch.arange(5, device=device), token_ids, 20)
    assert bool(((top_ids >= 0) & (top_ids < 700)).all())
    for mine, theirs in zip((sampled[4:], top_ids[4:], top[4:]), reference(logits[4:], token_ids[4:], 20), strict=True):
        torch.testing.assert_close(mine.to(theirs.dtype), theirs, rtol=1e-6, atol=1e-5)


def test_more_than_can_be_picked_is_refused_tiny(device: torch.device) -> None:
    one = torch.zeros(1, dtype=torch.int64, device=device)
    for vocab, k in ((700, 21), (9, 10), (700, -1)):
        with pytest.raises(ValueError, match="k: "):
            likeliest.likeliest(torch.randn(1, vocab, device=device), one, one, k)
