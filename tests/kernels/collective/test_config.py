"""Configs of sums and gathers: pushed data of any size fit the mailboxes, and configs change only at borders."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from aengine.kernels.collective.config import (
    OVERLAPPED_ROWS,
    Pulled,
    Pushed,
    gather_config,
    norm_config,
    sum_borders,
    sum_config,
)
from aengine.kernels.collective.kernels import (
    pulled_gather_kernel,
    pulled_sum_kernel,
    pushed_gather_kernel,
    pushed_sum_kernel,
)
from aengine.kernels.collective.mailboxes import LANE, LANES, PROGRAMS, Mailbox
from aengine.kernels.collective.peers import PeerCollective
from aengine.kernels.variants import KeptVariants

MB = 1 << 20


def collective(count: int) -> PeerCollective:
    lanes = torch.zeros(1, dtype=torch.int32).expand(2, count, PROGRAMS, LANES // count // PROGRAMS, LANE // 4)
    nothing = torch.zeros(2, dtype=torch.int64)
    return PeerCollective(0, Mailbox(lanes, nothing, nothing, nothing))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_pushed_data_fit_the_mailboxes(count: int) -> None:
    ranks = collective(count)
    for lanes in [1, 100, *range(511, LANES, 24_989)]:
        for config in (sum_config(lanes, count), gather_config(lanes, count)):
            if isinstance(config, Pushed):
                assert ranks._grid(lanes, config)[0] <= PROGRAMS
    for row in (1, 8, 130, 512, 1024):
        for rows in (1, 7, 256, 5000):
            fused = norm_config(rows, row, count)
            assert fused is None or ranks._grid(rows * row, fused)[0] <= PROGRAMS


@pytest.mark.parametrize(("count", "pushed", "pulled"), [(2, 16 * MB, 17 * MB), (4, MB, 2 * MB), (8, MB // 4, MB // 2)])
def test_more_ranks_pull_smaller_sums(count: int, pushed: int, pulled: int) -> None:
    assert isinstance(sum_config(pushed // LANE, count), Pushed)
    assert isinstance(sum_config(pulled // LANE, count), Pulled)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("row", [32, 512, 640, 1024])
def test_configs_of_sums_change_only_at_borders(count: int, row: int) -> None:
    borders = sum_borders(row, count, 8192)
    assert OVERLAPPED_ROWS - 1 in borders
    cuts = [(sum_config(rows * row, count), norm_config(rows, row, count)) for rows in range(1, 8192)]
    assert {rows for rows in range(1, 8191) if cuts[rows - 1] != cuts[rows]} <= set(borders)


@pytest.mark.skipif(not isinstance(pulled_gather_kernel.jit, JITFunction), reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("kernel", "varying"),
    [
        (pushed_sum_kernel, ["rank", "lanes"]),
        (pushed_gather_kernel, ["rank", "lanes"]),
        (pulled_sum_kernel, ["rank"]),  # the size is a multiple of the rows' width
        (pulled_gather_kernel, ["rank", "rows"]),
    ],
)
def test_no_variant_depends_on_the_number_of_rows(kernel: KeptVariants, varying: list[str]) -> None:
    specialized = {param.name for param in kernel.jit.params if not param.do_not_specialize}
    assert not specialized.intersection(varying)


def test_more_than_a_mailbox_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="more than a mailbox holds"):
        collective(2)._grid(LANES, Pushed(512, 16))
