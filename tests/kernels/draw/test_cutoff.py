from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aengine.sampling.draw import lowest_kept

cutoff = pytest.importorskip("aengine.kernels.draw.cutoff")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(params=[32, 4096], ids=["ladders", "list"])
def candidates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Shorten the list, so that small vocabularies need ladders too, and some rows do not fit the list."""
    monkeypatch.setattr(cutoff, "CANDIDATES", request.param)
    return int(request.param)


def filters(rows: list[dict[str, float]], vocab: int, device: torch.device) -> dict[str, Tensor]:
    """Return parameters of rows as the kernels take them; by default temperature 1 and no filter."""
    full = [{"temperature": 1.0, **OFF, **row} for row in rows]
    floats = {
        "temperature": [row["temperature"] for row in full],
        "top_p": [row["top_p"] if row["top_p"] < 1 else 2.0 for row in full],
        "log_min_p": [math.log(row["min_p"]) if row["min_p"] > 0 else -math.inf for row in full],
    }
    columns = {name: torch.tensor(values, device=device) for name, values in floats.items()}
    top_k = [int(row["top_k"]) if 0 < row["top_k"] < vocab else vocab for row in full]
    return {**columns, "top_k": torch.tensor(top_k, dtype=torch.int32, device=device)}


def found(logits: Tensor, of_rows: dict[str, Tensor]) -> Tensor:
    floor = cutoff.Cutoff(len(logits), logits.device)(logits, **of_rows)
    assert floor.dtype == torch.float32
    return floor.cpu()


def reference(logits: Tensor, of_rows: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    columns = {name: values.cpu()[:, None] for name, values in of_rows.items()}
    top_k = columns.pop("top_k")
    columns = {name: values.to(dtype) for name, values in columns.items()}
    floor = lowest_kept(logits.cpu().to(dtype), top_k=top_k, width=logits.shape[1], **columns).float()
    return floor.masked_fill(columns["temperature"] == 0, -torch.inf)[:, 0]


def assert_right(logits: Tensor, of_rows: dict[str, Tensor]) -> None:
    """Assert that the reference keeps the same tokens, unless top_p is too close to a token's end for float32."""
    floors, expected = found(logits, of_rows)[:, None], reference(logits, of_rows)[:, None]
    x = logits.cpu().float()
    of_a_token = (x == floors).any(dim=1) | (floors[:, 0] == -torch.inf) | (of_rows["log_min_p"].cpu() > -torch.inf)
    assert of_a_token.all()
    for row in ((x >= floors) != (x >= expected)).any(dim=1).nonzero()[:, 0].tolist():
        weights = ((x[row].double() - x[row].max()) / float(of_rows["temperature"][row])).exp()
        most = weights.sort(descending=True).values[: int(of_rows["top_k"][row])].sum()
        only_one_keeps = weights[(x[row] >= floors[row]) != (x[row] >= expected[row])].sum()
        assert only_one_keeps < 2e-6 * most, (row, floors[row], expected[row])


def a_bit_of_everything(rows: int) -> list[dict[str, float]]:
    kinds: list[dict[str, float]] = [
        {},
        {"top_k": 1},
        {"top_k": 50},
        {"top_p": 0.95},
        {"top_p": 0.95, "temperature": 0.6, "top_k": 20},
        {"min_p": 0.05},
        {"min_p": 0.02, "top_p": 0.9, "top_k": 100, "temperature": 1.3},
        {"top_p": 1e-6},
        {"top_p": 0.9999},
        {"top_k": 300, "top_p": 0.3, "temperature": 2.0},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    ]
    return [kinds[row % len(kinds)] for row in range(rows)]


SHAPES = [
    pytest.param(22, 777, id="tiny"),
    pytest.param(11, 5001, id="tiny-pieces"),
    (11, 151_936),
    (264, 151_936),
    (33, 32_001),
    (2, 262_144),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
def test_floors_equal_those_of_a_sort(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device, candidates: int
) -> None:
    torch.manual_seed(rows)
    logits = (torch.randn(rows, vocab, device=device) * 3).to(dtype)
    assert_right(logits, filters(a_bit_of_everything(rows), vocab, device))


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("temperature", [1e-3, 0.05, 1.0, 10.0, 100.0])
def test_any_temperature_tiny(temperature: float, device: torch.device, candidates: int) -> None:
    torch.manual_seed(3)
    vocab = 1200
    rows = [{**row, "temperature": temperature} for row in a_bit_of_everything(10)]
    assert_right(torch.randn(10, vocab, device=device) * 4, filters(rows, vocab, device))


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_any_top_k_tiny(top_p: float, device: torch.device, candidates: int) -> None:
    torch.manual_seed(4)
    logits = torch.randn(3, 900, device=device)
    logits[1] = logits[1].round()
    for top_k in (1, 2, 31, 32, 33, 899, 900):
        assert_right(logits, filters([{"top_k": top_k, "top_p": top_p}] * 3, 900, device))


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("top_p", [1e-9, 1e-3, 0.2, 0.5, 0.99, 1 - 1e-5, 1 - 2**-24])
def test_any_top_p_tiny(top_p: float, device: torch.device, candidates: int) -> None:
    torch.manual_seed(5)
    logits = torch.randn(4, 2000, device=device) * torch.tensor([[0.1], [1.0], [5.0], [30.0]], device=device)
    assert_right(logits, filters([{"top_p": top_p}] * 4, 2000, device))


def test_a_top_p_of_one_keeps_all_tokens_with_a_weight_tiny(device: torch.device, candidates: int) -> None:
    of_rows = filters([{}], 1000, device)
    of_rows["top_p"].fill_(1.0)
    logits = torch.linspace(-90, 0, 1000, device=device)[None]
    assert -40 < found(logits, of_rows).item() < -25


def test_equals_of_the_last_one_are_kept_but_only_k_of_them_count_tiny(device: torch.device, candidates: int) -> None:
    """Ten logits are 2, a hundred 1, the rest 0: a top_k of 30 ends among the hundred, and counts twenty of them."""
    logits = torch.zeros(4, 1500, device=device)
    logits[:, 5:1005:10] = 1.0
    logits[:, 3:103:10] = 2.0
    of_ten = 10 / (10 + 20 * math.exp(-1))
    rows = [{"top_k": 30}, {"top_k": 30, "top_p": of_ten - 0.01}, {"top_k": 30, "top_p": of_ten + 0.01}, {"top_p": 0.5}]
    of_rows = filters(rows, 1500, device)
    assert found(logits, of_rows).tolist() == [1.0, 2.0, 1.0, 0.0]
    assert_right(logits, of_rows)


def test_rows_of_equal_logits_are_kept_completely_tiny(device: torch.device, candidates: int) -> None:
    for value in (0.0, -0.0, 1.5, -3e38, 3e38, 1e-40):
        logits = torch.full((4, 1100), value, device=device)
        rows = [{"top_k": 3}, {"top_p": 0.4}, {"top_k": 40, "top_p": 0.1}, {"min_p": 0.3, "top_k": 9}]
        assert (found(logits, filters(rows, 1100, device)) <= value).all()


def test_values_far_apart_tiny(device: torch.device, candidates: int) -> None:
    """If quarters of the interval make no progress, keys still do."""
    torch.manual_seed(6)
    logits = torch.randn(6, 1300, device=device)
    logits[0, 7] = 3e38
    logits[1, 7] = -3e38
    logits[2, ::2] = -1e9
    logits[3] *= 1e-30
    logits[4] *= 1e30
    logits[5] = torch.randn(1300, device=device) * torch.logspace(-40, 38, 1300, device=device)
    for row in ({"top_k": 40}, {"top_p": 0.7}, {"top_k": 200, "top_p": 0.6}, {"top_k": 700}):
        assert_right(logits, filters([row] * 6, 1300, device))


@pytest.mark.thinned
@pytest.mark.parametrize("sign", [1, -1])
def test_neighbouring_floats_are_distinguished_tiny(
    sign: int, dtype: torch.dtype, device: torch.device, candidates: int
) -> None:
    torch.manual_seed(11)
    steps = torch.randint(0, 6, (4, 400), device=device)
    logits = (sign * (1 + steps * torch.finfo(dtype).eps)).to(dtype)
    assert len(logits.unique()) == 6
    assert_right(logits, filters([{"top_k": 1}, {"top_k": 150}, {"top_p": 0.5}, {"top_k": 399}], 400, device))


def test_masked_tokens_are_never_needed_tiny(dtype: torch.dtype, device: torch.device, candidates: int) -> None:
    torch.manual_seed(7)
    logits = torch.randn(6, 1400, device=device).to(dtype)
    logits[:3, 10:] = -torch.inf
    logits[3:, 100:] = -torch.inf
    rows: list[dict[str, float]] = [{"top_k": 50}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.9}]
    of_rows = filters(rows * 2, 1400, device)
    assert found(logits, of_rows)[0] == -torch.inf
    assert_right(logits, of_rows)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("filtered", [{"top_p": 0.9}, {"top_k": 70, "top_p": 0.9, "min_p": 0.01}, {"min_p": 0.1}])
def test_invalid_rows_end_and_do_not_affect_others_tiny(
    filtered: dict[str, float], device: torch.device, candidates: int
) -> None:
    torch.manual_seed(8)
    logits = torch.randn(6, 1500, device=device)
    of_rows = filters([filtered] * 6, 1500, device)
    healthy = found(logits, of_rows)
    logits[1, 1499] = torch.nan
    logits[2, 5] = torch.inf
    logits[4, :] = -torch.inf
    logits[5, :] = torch.nan
    floor = found(logits, of_rows)
    assert torch.equal(floor[[0, 3]], healthy[[0, 3]])
    assert (floor[[1, 2, 4, 5]] == -torch.inf).all()


def test_a_row_without_filters_is_not_read_tiny(device: torch.device) -> None:
    """NaN makes a filtered row invalid, but is not noticed in a row without filters."""
    logits = torch.full((3, 1100), torch.nan, device=device)
    rows = [{"temperature": 0.0, "top_k": 3}, {}, {"temperature": 0.0, "min_p": 0.5}]
    cut = cutoff.Cutoff(3, device)
    assert (cut(logits, **filters(rows, 1100, device)) == -torch.inf).all()
    assert not cut._ends.any()


def test_a_row_has_the_same_floor_in_every_batch_tiny(device: torch.device, candidates: int) -> None:
    """For any number of pieces, and after any earlier call."""
    torch.manual_seed(9)
    logits = torch.randn(16, 12_000, device=device) * 2
    searched: dict[int, dict[str, float]] = {3: {"top_p": 0.9}, 8: {"top_k": 20, "top_p": 0.9}, 15: {"top_k": 50}}
    of_rows = filters([searched.get(row, {}) for row in range(16)], 12_000, device)
    cut = cutoff.Cutoff(16, device)
    together = cut(logits, **of_rows)
    assert torch.equal(cut(logits, **of_rows), together)
    for row in searched:
        alone = {name: values[row : row + 1] for name, values in of_rows.items()}
        assert cut(logits[row : row + 1], **alone)[0] == together[row]


def test_parameters_may_be_columns_of_a_table_tiny(device: torch.device) -> None:
    torch.manual_seed(10)
    logits = torch.randn(9, 2500, device=device)
    of_rows = filters(a_bit_of_everything(9), 2500, device)
    table = torch.zeros(9, 10, dtype=torch.int32, device=device)
    table[:, 0] = of_rows["top_k"]
    floats = table.view(torch.float32)
    for column, name in ((4, "temperature"), (5, "top_p"), (6, "log_min_p")):
        floats[:, column] = of_rows[name]
    columns = {"temperature": floats[:, 4], "top_k": table[:, 0], "top_p": floats[:, 5], "log_min_p": floats[:, 6]}
    cut = cutoff.Cutoff(9, device)
    assert torch.equal(cut(logits, **columns), cut(logits, **of_rows))


def test_too_many_tokens_are_refused_tiny(device: torch.device) -> None:
    vocab = cutoff.MOST_TOKENS + 1
    with pytest.raises(ValueError, match="logits"):
        cutoff.Cutoff(1, device)(torch.zeros(1, vocab, device=device), **filters([{}], vocab, device))
