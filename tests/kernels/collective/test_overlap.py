"""Sums that overlap with other work."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from aengine.kernels.collective.config import OVERLAPPED_ROWS, ROW_TILE, sum_pieces
from aengine.kernels.collective.mailboxes import SLOT_BYTES, SLOTS
from aengine.kernels.collective.peers import PeerCollective, reset_collectives
from aengine.kernels.elementwise import TritonNorm
from tests.kernels.collective.test_peers import Ranks
from tests.kernels.conftest import relative_error


@pytest.mark.parametrize("tokens", [1, OVERLAPPED_ROWS - 1, OVERLAPPED_ROWS, OVERLAPPED_ROWS + 77, 16384])
def test_many_tokens_are_in_two_halves_of_whole_tiles(tokens: int) -> None:
    pieces = sum_pieces(tokens)
    assert pieces[0].start == 0
    assert pieces[-1].stop == tokens
    assert all(one.stop == other.start for one, other in itertools.pairwise(pieces))
    assert len(pieces) == (1 if tokens < OVERLAPPED_ROWS else SLOTS - 1)
    assert all(one.stop % ROW_TILE == 0 for one in pieces[:-1])


class Turns:
    """Sums on several ranks, of which at most two are pending, alternating with sums that do not overlap."""

    def __init__(self, ranks: Ranks, rows: int, hidden: int, turns: int) -> None:
        self.parts = [ranks.tensors(rows, hidden, dtype=torch.bfloat16) for _ in range(turns)]
        self.residual = torch.randn(rows, hidden).bfloat16()
        # Uploads come first, because they would wait for a rank that waits for another.
        self.ones = ranks.copies(torch.ones(1, hidden).bfloat16())
        self.residuals = ranks.copies(self.residual)
        self.norms = [TritonNorm(weight, 1e-6) for weight in ranks.copies(torch.rand(hidden).bfloat16() + 0.5)]

    def expected(self) -> list[Tensor]:
        found = []
        for parts in self.parts:
            wide = parts[0].cpu().float()
            for part in parts[1:]:
                wide = wide + part.cpu().float()
            found.append((wide + self.residual.float()).to(self.residual.dtype))
        return found

    def run(self, rank: PeerCollective) -> list[tuple[Tensor, Tensor]]:
        norm, results, begun = self.norms[rank.index], [], []
        for parts in self.parts:
            x = self.residuals[rank.index].clone()
            begun.append((rank.begin_sum(parts[rank.index].clone(), x), x))
            if len(begun) == SLOTS - 1:
                results.append(finished(*begun.pop(0), norm))
                rank.sum(self.ones[rank.index].clone())  # after the other one
        return results + [finished(*one, norm) for one in begun]


def finished(begun: object, x: Tensor, norm: TritonNorm) -> tuple[Tensor, Tensor]:
    normed = torch.empty_like(x)
    begun.finish(x, norm, normed)  # type: ignore[attr-defined]
    return x, normed


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("rows", "hidden"), [(300, 1024), (2048, 4096), (SLOT_BYTES // 8192 + 1, 4096)])
def test_pending_sums_are_in_the_order_of_the_ranks_on_every_rank(count: int, rows: int, hidden: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ranks = Ranks(count)
    turns = Turns(ranks, rows, hidden, turns=5)
    for patience in (0.0, 10.0):  # the first use of a kernel waits for the device
        reset_collectives(ranks.collectives, patience)
        results = []
        for one, stream in zip(ranks.collectives, ranks.streams):
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                results.append(turns.run(one))
        ranks.wait()
    assert not any(bool(rank.failed.item()) for rank in ranks.collectives)
    for place, expected in enumerate(turns.expected()):
        for rank, found in enumerate(results):
            x, normed = found[place]
            assert x.cpu().equal(expected)
            with torch.cuda.device(x.device):
                assert relative_error(normed, turns.norms[rank](x)) < 5e-3
            assert normed.cpu().equal(results[0][place][1].cpu())


@pytest.mark.gpu
def test_more_pending_sums_than_slots_allow_are_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ranks = Ranks(2)
    reset_collectives(ranks.collectives, 0.0)
    rank, part = ranks.collectives[0], torch.ones(8, 64, device=ranks.devices[0])
    with torch.cuda.stream(ranks.streams[0]):
        for _ in range(SLOTS - 1):
            rank.begin_sum(part, part.clone())
        with pytest.raises(RuntimeError, match="pending"):
            rank.begin_sum(part, part.clone())
