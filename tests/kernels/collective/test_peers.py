"""Sums and gathers of the GPUs of one host, also if one of them does not take part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from aengine.errors import ConfigError
from aengine.kernels.collective.config import Pulled, Pushed
from aengine.kernels.collective.mailboxes import Mailbox, open_mailboxes
from aengine.kernels.collective.peers import PeerCollective, connect, reset_collectives
from aengine.kernels.elementwise import TritonNorm
from tests.kernels.conftest import relative_error, tolerance

T = TypeVar("T")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


class Ranks:
    """Ranks with a stream each, on the available GPUs in turn. One thread launches for all of them.

    Several ranks may share a GPU if it has room for the programs of all of them at once.
    """

    def __init__(self, count: int) -> None:
        self.devices = [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(count)]
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        boxes = open_mailboxes(self.devices, patience=10.0)
        self.collectives = [PeerCollective(rank, box) for rank, box in enumerate(boxes)]
        for device in self.devices:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):  # loads the kernel that removes columns
                torch.ones(2, 3, 8, device=device, dtype=dtype)[:, :, :3].reshape(2, -1)[:, :4].contiguous()

    def each(self, call: Callable[[PeerCollective], T]) -> list[T]:
        """Return each rank's result.

        Only the first kernel of a call may be new, because loading waits for running kernels.
        """
        results = []
        self.wait()
        for collective, device, stream in zip(self.collectives, self.devices, self.streams, strict=True):
            with torch.cuda.device(device), torch.cuda.stream(stream):
                results.append(call(collective))
        self.wait()
        assert not any(bool(collective.failed.item()) for collective in self.collectives)
        return results

    def wait(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def tensors(self, *shape: int, dtype: torch.dtype) -> list[Tensor]:
        """Return different parts for each rank."""
        return [torch.randn(*shape, device=device).to(dtype) for device in self.devices]

    def copies(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.to(device) for device in self.devices]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Ranks(request.param)


def total(parts: list[Tensor], residual: Tensor | None) -> Tensor:
    """Add up in the order of the ranks, then the residual, and round once."""
    wide = parts[0].cpu().float()
    for part in parts[1:]:
        wide = wide + part.cpu().float()
    return (wide if residual is None else wide + residual.cpu().float()).to(parts[0].dtype)


@pytest.mark.gpu
@pytest.mark.alone  # ranks that share a GPU wait for each other, so all must fit
@DTYPES
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, None),
        (3, Pushed(256, 8)),
        (130, Pushed(128, 4)),
        (130, Pushed(512, 8, programs=32)),
        (130, Pulled(4096, 16, 8)),
        (1, Pulled(4096, 16, 64)),
        (190, None),
        (3000, None),
    ],
    ids=str,
)
def test_sums_are_in_the_order_of_the_ranks_on_every_rank(
    ranks: Ranks, rows: int, config: Pushed | Pulled | None, residual: bool, dtype: torch.dtype
) -> None:
    parts = ranks.tensors(rows, 1040, dtype=dtype)
    residuals = ranks.copies(torch.randn(rows, 1040).to(dtype)) if residual else [None] * len(parts)
    expected = total(parts, residuals[0])
    for x in ranks.each(lambda rank: rank.sum(parts[rank.index], residuals[rank.index], config)):
        torch.testing.assert_close(x.cpu(), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.alone
@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (5, 5120), (64, 1040), (80, 2048), (2000, 1024), (2, 32768)])
def test_a_sum_and_its_norm(ranks: Ranks, rows: int, width: int, dtype: torch.dtype) -> None:
    parts, residuals = ranks.tensors(rows, width, dtype=dtype), ranks.copies(torch.randn(rows, width).to(dtype))
    expected = total(parts, residuals[0])
    norms = [TritonNorm(weight, 1e-6) for weight in ranks.copies((torch.rand(width) + 0.5).to(dtype))]
    if rows == 2000 and len(set(ranks.devices)) < len(parts):
        pytest.skip("the norm behind a sum waits on the device where other ranks want to add up")
    for norm, part in zip(norms, parts, strict=True):
        with torch.cuda.device(part.device):
            norm(part)  # loads the kernel
    results = ranks.each(lambda rank: rank.sum_and_norm(parts[rank.index], residuals[rank.index], norms[rank.index]))
    for x, normed in results:
        torch.testing.assert_close(x.cpu(), expected, rtol=0, atol=0)
        torch.testing.assert_close(normed.cpu(), results[0][1].cpu(), rtol=0, atol=0)
    assert relative_error(results[0][1], norms[0](results[0][0])) < tolerance(dtype)


@pytest.mark.gpu
@pytest.mark.alone
@DTYPES
@pytest.mark.parametrize("config", [None, Pushed(256, 4), Pulled(4096, 16, 16)], ids=str)
@pytest.mark.parametrize(("rows", "n", "cut"), [(1, 4096, 0), (7, 1040, 16), (3, 75, 0), (40, 37, 20)])
def test_columns_are_side_by_side(
    ranks: Ranks, rows: int, n: int, cut: int, config: Pushed | Pulled | None, dtype: torch.dtype
) -> None:
    parts = ranks.tensors(rows, n, dtype=dtype)
    width = len(parts) * n - cut
    expected = torch.cat([part.cpu() for part in parts], dim=1)[:, :width]
    for whole in ranks.each(lambda rank: rank.gather(parts[rank.index], width, config)):
        assert whole.is_contiguous()
        torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("config", [Pushed(128, 4), Pulled(4096, 16, 8)], ids=str)
def test_every_nan_is_sent_as_a_nan(ranks: Ranks, config: Pushed | Pulled) -> None:
    """The bits of an empty word are a NaN as well."""
    parts = ranks.tensors(1, 4096, dtype=torch.float32)
    parts[-1].view(torch.int32).fill_(-1)
    for x in ranks.each(lambda rank: rank.sum(parts[rank.index], None, config)):
        assert bool(x.isnan().all())


@pytest.mark.gpu
@pytest.mark.alone
def test_graphs_replay_and_sizes_mix(ranks: Ranks) -> None:
    """Each replay has other data. Between replays there are calls of other sizes, kinds and grids."""
    inputs = [torch.zeros(1, device=device) for device in ranks.devices]
    sizes = (1, 48, 3, 601, 2, 40, 16)
    count = len(inputs)

    def call(rank: PeerCollective, rows: int) -> Tensor:
        value = inputs[rank.index] + rows
        if rows % 2:
            return rank.sum((value + rank.index).expand(rows, 4096).contiguous())
        return rank.gather(value.expand(rows, 4096).contiguous(), count * 4096)

    for rows in sizes:  # compile and load before capturing
        ranks.each(partial(call, rows=rows))
    graphs = [torch.cuda.CUDAGraph() for _ in inputs]
    results: list[list[Tensor]] = []
    for rank, graph, stream in zip(ranks.collectives, graphs, ranks.streams, strict=True):
        with (
            torch.cuda.device(stream.device),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            results.append([call(rank, rows) for rows in sizes])

    def step(rank: PeerCollective, turn: int) -> Tensor:
        inputs[rank.index].fill_(turn)
        graphs[rank.index].replay()
        return rank.sum(torch.ones(turn + 1, 1024, device=inputs[rank.index].device))

    for turn in range(5):
        for between in ranks.each(partial(step, turn=turn)):
            assert bool((between == count).all())
        for result in results:
            for rows, x in zip(sizes, result, strict=True):
                value = count * (turn + rows) + count * (count - 1) // 2 if rows % 2 else turn + rows
                assert bool((x == value).all())


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("config", [Pushed(128, 4), Pulled(4096, 16, 8)], ids=str)
def test_a_rank_that_waits_too_long_gives_up_and_reports_it(ranks: Ranks, config: Pushed | Pulled) -> None:
    reset_collectives(ranks.collectives, 0.05)
    parts = [torch.ones(8, 4096, device=device) for device in ranks.devices]
    ranks.wait()
    with torch.cuda.device(0), torch.cuda.stream(ranks.streams[0]):
        for _ in range(20):  # only the first call waits
            ranks.collectives[0].sum(parts[0], None, config)
    ranks.wait()
    assert [int(collective.failed.item()) for collective in ranks.collectives[:2]] == [1, 0]
    reset_collectives(ranks.collectives, 10.0)
    parts[0].fill_(1)
    for x in ranks.each(lambda rank: rank.sum(parts[rank.index], None, config)):
        assert bool((x == len(parts)).all())


@pytest.mark.gpu
@pytest.mark.alone
def test_a_rank_that_gave_up_sends_nothing_for_later_calls(ranks: Ranks) -> None:
    """The others may only receive data that it sent for earlier calls. Its addresses must not arrive."""
    parts = [torch.ones(64, 4096, device=device) for device in ranks.devices]
    reset_collectives(ranks.collectives, 0.05)
    ranks.wait()
    for rank, part, stream in zip(ranks.collectives, parts, ranks.streams, strict=True):
        with torch.cuda.device(part.device), torch.cuda.stream(stream):
            for _ in range(6):
                for config in (Pulled(4096, 16, 8), Pushed(128, 4), Pushed(128, 4)):
                    part.fill_(float("nan"))  # no valid address
                    rank.sum(part, None, config)
        ranks.wait()
    assert all(int(rank.failed.item()) for rank in ranks.collectives)
    reset_collectives(ranks.collectives, 10.0)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("config", [Pushed(128, 4), Pulled(4096, 16, 8)], ids=str)
def test_without_patience_ranks_rehearse_alone(ranks: Ranks, config: Pushed | Pulled) -> None:
    reset_collectives(ranks.collectives, 0.0)
    parts = [torch.full((8, 4096), float(rank.index), device=rank.box.lanes.device) for rank in ranks.collectives]
    ranks.wait()
    for rank, part, stream in zip(ranks.collectives, parts, ranks.streams, strict=True):
        with torch.cuda.device(part.device), torch.cuda.stream(stream):
            rank.sum(part, None, config)
        ranks.wait()
        assert all(bool((other == index).all()) for index, other in enumerate(parts))
    reset_collectives(ranks.collectives, 10.0)
    for x in ranks.each(lambda rank: rank.sum(parts[rank.index], None, config)):
        assert bool((x == sum(range(len(parts)))).all())


def test_devices_that_cannot_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: False)
    with pytest.raises(ConfigError, match="cuda:0 has no access to the memory of cuda:1, by NVLink or peer to peer"):
        connect([torch.device("cuda", 0), torch.device("cuda", 1)])


@pytest.mark.parametrize("indices", [(0,), (0, 0), (0, 1, 2)])
def test_ranks_are_a_power_of_two_of_different_devices(indices: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="2, 4 or 8 different devices"):
        connect([torch.device("cuda", i) for i in indices])


@pytest.mark.parametrize(
    ("part", "residual"),
    [
        (torch.zeros(2, 6), None),
        (torch.zeros(8, 4).t(), None),
        (torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.float16)),
        (torch.zeros(2, 8), torch.zeros(8, 2).t()),
    ],
)
def test_parts_that_the_kernels_cannot_read_are_refused(part: Tensor, residual: Tensor | None) -> None:
    lanes, nothing = torch.zeros(2, 2, 1, 1, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    collective = PeerCollective(0, Mailbox(lanes, nothing, nothing, nothing))
    with pytest.raises(ValueError, match="contiguous"):
        collective.sum(part, residual)
