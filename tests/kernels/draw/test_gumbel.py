from __future__ import annotations

import pytest
import torch

from aengine.sampling import noise

gumbel = pytest.importorskip("aengine.kernels.draw.gumbel")
pytestmark = pytest.mark.gpu


def parameters(rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    seeds = torch.randint(-(2**31), 2**31, (2, rows), device=device).int()
    positions = torch.randint(0, 100_000, (rows,), device=device)
    return {
        "seed_low": seeds[0],
        "seed_high": seeds[1],
        "positions": positions,
        "lines": torch.arange(rows, device=device),
    }


def random_rows(
    rows: int, vocab: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits, temperatures, some of them 0, and the other parameters."""
    temperature = torch.rand(rows, device=device) * 2
    temperature[::3] = 0.0
    return torch.randn(rows, vocab, device=device) * 3, temperature, parameters(rows, device)


def reference(logits: torch.Tensor, temperature: torch.Tensor, **of_rows: torch.Tensor) -> torch.Tensor:
    """Return the scores whose argmax is the draw."""
    low, high, positions = (of_rows[name][:, None].int() for name in ("seed_low", "seed_high", "positions"))
    noises = noise.gumbel(noise.token_codes(logits.shape[1], logits.device), *noise.row_keys(low, high, positions))
    return noises * temperature[:, None] + logits.float()


SHAPES = [
    pytest.param(3, 500, id="tiny"),
    pytest.param(2, 9001, id="tiny-pieces"),
    pytest.param(12, 20_000, id="tiny-blocks"),
    (1, 151_936),
    (200, 151_936),
    (65, 32_001),
]


@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
def test_draws_are_the_argmax_of_logits_plus_the_samplers_noise(rows: int, vocab: int, device: torch.device) -> None:
    logits, temperature, of_rows = random_rows(rows, vocab, device)
    draw = gumbel.Draw(rows, device)
    for _ in range(2):
        ids, finite = draw(logits, temperature, **of_rows)
        assert finite.all()
        assert torch.equal(ids, reference(logits, temperature, **of_rows).argmax(dim=1))


@pytest.mark.parametrize(("rows", "vocab"), [pytest.param(3, 500, id="tiny"), (1, 151_936), (200, 151_936)])
def test_parameters_may_be_columns_of_a_table_with_a_line_for_each_row(
    rows: int, vocab: int, device: torch.device
) -> None:
    logits, temperature, of_rows = random_rows(rows, vocab, device)
    draw = gumbel.Draw(rows, device)
    lines = torch.randperm(2 * rows, device=device)[:rows]
    table = torch.zeros(2 * rows, 10, dtype=torch.int32, device=device)
    table[lines, 1], table[lines, 2] = of_rows["seed_low"], of_rows["seed_high"]
    table.view(torch.float32)[lines, 4] = temperature
    columns = table.view(torch.float32)[:, 4], table[:, 1], table[:, 2], of_rows["positions"], lines
    expected = draw(logits, temperature, **of_rows)[0]
    assert torch.equal(draw(logits, *columns)[0], expected)
    found = draw.candidates(logits, *columns, first=0, valid=vocab)
    assert torch.equal(found[:, 1].long(), expected)


def in_parts(
    logits: torch.Tensor, temperature: torch.Tensor, count: int, **of_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from several parts of the tokens; the last parts have columns without a token."""
    rows, vocab = logits.shape
    each = -(-vocab // count)
    wide = torch.nn.functional.pad(logits, (0, count * each - vocab), value=torch.inf)
    found = [
        gumbel.Draw(rows, logits.device).candidates(
            wide[:, first : first + each].contiguous(), temperature, **of_rows, first=first, valid=vocab - first
        )
        for first in range(0, count * each, each)
    ]
    return gumbel.choose(torch.stack(found, dim=1))


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize(("rows", "vocab"), [*SHAPES, pytest.param(3, 9, id="tiny-none")])
def test_the_best_candidate_of_all_parts_is_the_draw(rows: int, vocab: int, count: int, device: torch.device) -> None:
    logits = (torch.randn(rows, vocab, device=device) * 2).round()  # many equals
    temperature = torch.rand(rows, device=device)
    temperature[::2] = 0.0
    of_rows = parameters(rows, device)
    ids, finite = in_parts(logits, temperature, count, **of_rows)
    assert finite.all()
    assert torch.equal(ids, gumbel.Draw(rows, device)(logits, temperature, **of_rows)[0])


@pytest.mark.parametrize("column", [0, 3999])
def test_a_row_is_finite_if_all_its_parts_are_tiny(column: int, device: torch.device) -> None:
    logits = torch.zeros(5, 4000, device=device)
    logits[1, column] = torch.nan
    logits[2, column] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, column] = 1.0
    ids, finite = in_parts(logits, torch.zeros(5, device=device), 2, **parameters(5, device))
    assert finite.tolist() == [True, False, False, False, True]
    assert ids[4] == column
    assert ((ids >= 0) & (ids < 4000)).all()


def test_the_noise_is_bit_for_bit_the_samplers_tiny(device: torch.device) -> None:
    """With equal logits the noise alone decides, so ids must be the same for many seeds."""
    rows, vocab = 40, 2500
    of_rows = parameters(rows, device)
    logits, temperature = torch.zeros(rows, vocab, device=device), torch.ones(rows, device=device)
    ids, _ = gumbel.Draw(rows, device)(logits, temperature, **of_rows)
    assert torch.equal(ids, reference(logits, temperature, **of_rows).argmax(dim=1))


def test_among_equals_the_lowest_id_wins_tiny(device: torch.device) -> None:
    logits = torch.zeros(2, 5000, device=device)
    logits[0, [7, 4500]] = 1.0
    logits[1, [4999, 2048]] = 1.0
    ids, _ = gumbel.Draw(2, device)(logits, torch.zeros(2, device=device), **parameters(2, device))
    assert ids.tolist() == [7, 2048]


def test_rows_that_are_not_finite_tiny(device: torch.device) -> None:
    logits = torch.randn(6, 3000, device=device)
    logits[1, 2999] = float("nan")
    logits[2, 5] = float("inf")
    logits[3, :] = float("-inf")
    logits[4, 1:] = float("-inf")
    logits[5, 10:] = float("-inf")
    logits[5, 0] = float("nan")
    ids, finite = gumbel.Draw(6, device)(logits, torch.zeros(6, device=device), **parameters(6, device))
    assert finite.tolist() == [True, False, False, False, True, False]
    assert ids[4] == 0
    assert ((ids >= 0) & (ids < 3000)).all()


def test_tokens_below_the_floor_are_not_drawn_tiny(dtype: torch.dtype, device: torch.device) -> None:
    """Tokens below the floor still count for finiteness, and tokens equal to the floor may be drawn."""
    torch.manual_seed(1)
    rows, vocab = 12, 5000
    logits = torch.randn(rows, vocab, device=device).to(dtype)
    floor = logits.float().sort(dim=1, descending=True).values[:, 3].clone()
    floor[5] = -torch.inf
    floor[6] = logits[6].max()
    temperature = torch.full((rows,), 5.0, device=device)
    temperature[7] = 0.0
    logits[8, 4321] = torch.nan
    logits[9] = -torch.inf
    of_rows = parameters(rows, device)
    ids, finite = gumbel.Draw(rows, device)(logits, temperature, floor=floor, **of_rows)
    kept = logits.float().masked_fill(logits.float() < floor[:, None], -torch.inf)
    healthy = torch.tensor([row not in (8, 9) for row in range(rows)], device=device)
    assert torch.equal(finite, healthy)
    assert torch.equal(ids[healthy], reference(kept, temperature, **of_rows).argmax(dim=1)[healthy])
    assert ids[6] == logits[6].argmax()
    assert bool((logits.gather(1, ids[:, None])[:, 0].float() >= floor)[healthy].all())
