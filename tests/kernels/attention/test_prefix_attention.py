from __future__ import annotations

import pytest
import torch

from aengine.kernels.kv_scales import encode
from tests.kernels.attention.test_decode_attention import K_SCALE, V_SCALE, narrow_dtype, paged, reference
from tests.kernels.conftest import relative_error, tolerance

decode_attention = pytest.importorskip("aengine.kernels.attention.decode_attention")
prefix_attention = pytest.importorskip("aengine.kernels.attention.prefix_attention")
pytestmark = pytest.mark.gpu


def runs_of(groups: list[tuple[list[int], int]], rows: int, capacity: int, device: torch.device) -> object:
    """Return SharedRuns for pairs of rows and a shared length, padded to `capacity` groups."""
    members = [row for group, _ in groups for row in group]
    starts, lens, own = [0], [], [0] * rows
    for group, length in groups:
        starts.append(starts[-1] + len(group))
        lens.append(length)
        for row in group:
            own[row] = length
    starts += [starts[-1]] * (capacity - len(groups))
    lens += [0] * (capacity - len(groups))
    members += [0] * (rows - len(members))
    tensors = (torch.tensor(values, dtype=torch.int32, device=device) for values in (members, starts, lens, own))
    return prefix_attention.SharedRuns(*tensors)


CASES = [
    pytest.param([100, 70, 90, 5], [([2, 0], 48)], 4, 2, 16, id="tiny"),
    pytest.param([40, 70, 90, 5, 0, 200, 33], [([6], 32), ([1, 5, 2], 64), ([0], 16)], 3, 1, 32, id="tiny-groups"),
    pytest.param([100, 70, 90, 5], [([2, 0], 48)], 4, 2, 24, id="tiny-24"),
    pytest.param([900, 1000], [([0, 1], 512)], 32, 32, 96, id="dim-96"),
    pytest.param([4000 + i for i in range(64)], [(list(range(64)), 3984)], 32, 8, 128, id="one-group"),
    pytest.param([1000] * 100 + [0, 3], [(list(range(50)), 512), (list(range(51, 100)), 992)], 32, 8, 128, id="two"),
    pytest.param(
        [900 + i for i in range(9)], [([i, i + 1], 16 * (i + 1)) for i in range(0, 8, 2)], 14, 2, 64, id="many"
    ),
]


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("lengths", "groups", "heads", "kv_heads", "dim"), CASES)
def test_sharing_changes_nothing_but_the_reads(
    lengths: list[int],
    groups: list[tuple[list[int], int]],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    q, k_cache, v_cache, table, lens = paged(lengths, heads, kv_heads, dim, 16, dtype, device)
    for rows, length in groups:
        table[rows, : length // 16] = table[rows[0], : length // 16]
    runs = runs_of(groups, len(lengths), 6, device)
    decode = decode_attention.PagedDecode()
    for _ in range(2):
        part = prefix_attention.attend_shared(q, k_cache, v_cache, table, runs, dim**-0.5)
        out = decode(q, k_cache, v_cache, table, lens, dim**-0.5, shared=part)
        assert relative_error(out, reference(q, k_cache, v_cache, table, lens, dim**-0.5)) < tolerance(dtype)


def test_without_groups_every_row_attends_alone_tiny(device: torch.device) -> None:
    inputs = paged([30, 50], 2, 1, 16, 16, torch.float32, device)
    runs = runs_of([], 2, 3, device)
    part = prefix_attention.attend_shared(*inputs[:4], runs, 0.25)
    out = decode_attention.PagedDecode()(*inputs, 0.25, shared=part)
    assert relative_error(out, reference(*inputs, 0.25)) < tolerance(torch.float32)


@pytest.mark.parametrize(
    ("lengths", "groups", "heads", "kv_heads", "dim"),
    [pytest.param([100, 70, 90, 5], [([2, 0], 48)], 4, 2, 64, id="tiny"), *CASES[4:6]],
)
def test_runs_of_codes_are_shared_too(
    lengths: list[int], groups: list[tuple[list[int], int]], heads: int, kv_heads: int, dim: int, device: torch.device
) -> None:
    q, k, v, table, lens = paged(lengths, heads, kv_heads, dim, 16, narrow_dtype(device), device)
    k, v = encode(k, K_SCALE), encode(v, V_SCALE)
    for rows, length in groups:
        table[rows, : length // 16] = table[rows[0], : length // 16]
    scale = dim**-0.5
    part = prefix_attention.attend_shared(q, k, v, table, runs_of(groups, len(lengths), 6, device), scale * K_SCALE)
    out = decode_attention.PagedDecode()(q, k, v, table, lens, scale * K_SCALE, shared=part, value_scale=V_SCALE)
    expected = reference(q, k.float() * K_SCALE, v.float() * V_SCALE, table, lens, scale)
    assert relative_error(out, expected) < tolerance(q.dtype)
