"""Tensors of all sizes and dtypes arrive, and no buffer is filled again before its copy has ended."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from aengine.errors import WeightsError
from aengine.model.checkpoint import staging
from aengine.model.checkpoint.pieces import Piece, RankMemory, cut
from aengine.model.checkpoint.safetensors import read_header
from aengine.model.checkpoint.staging import Buffer, StagingBuffer, WeightsDigest, copy_pieces, staging_ring

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


class LateBuffer(StagingBuffer):
    """A buffer whose copy happens as late as possible: in wait(), from what the buffer holds then."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, CPU)
        self.sent: Piece | None = None

    def send(self, piece: Piece) -> None:
        assert self.sent is None
        self.sent = piece

    def wait(self) -> None:
        if self.sent is not None:
            super().send(self.sent)
            self.sent = None


def late_ring(buffers: int, nbytes: int) -> list[LateBuffer]:
    return [LateBuffer(nbytes) for _ in range(buffers)]


def pieces_of(path: Path, places: dict[str, Tensor], most_bytes: int) -> list[Piece]:
    header = read_header(path)
    return [
        piece
        for name, into in places.items()
        for piece in cut(path, name, header[name], [RankMemory(into)], most_bytes)
    ]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Stored tensors, each with the dtype of its memory."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = {}
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 13), max_size=3))
        values = torch.randn(shape, generator=generator) * 100
        tensors[f"t{number}"] = (values.to(draw(st.sampled_from(DTYPES))), draw(st.sampled_from(DTYPES)))
    return tensors


def test_the_digest_tells_every_byte_and_every_name(tmp_path: Path) -> None:
    def digest_of(tensors: dict[str, Tensor], threads: int) -> bytes:
        path = tmp_path / "model.safetensors"
        save_file(tensors, path)
        places = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        digest = WeightsDigest()
        copy_pieces(pieces_of(path, places, 24), late_ring(threads + 2, 24), lambda _: None, digest)
        return digest.result()

    tensors = {"a": torch.arange(40.0), "b": torch.arange(7.0)}
    changed = [{**tensors, "a": torch.arange(40.0).index_fill(0, torch.tensor([place]), 0.5)} for place in range(40)]
    renamed = {"a": tensors["a"], "c": tensors["b"]}
    digests = [digest_of(one, 3) for one in (tensors, renamed, *changed)]
    assert len(set(digests)) == len(digests)
    assert digest_of(tensors, 1) == digest_of(tensors, 5) == digests[0]


@given(case=cases(), buffers=st.integers(1, 5), nbytes=st.integers(8, 100))
def test_every_element_arrives_in_the_dtype_of_its_place(
    tmp_path_factory: pytest.TempPathFactory,
    case: dict[str, tuple[Tensor, torch.dtype]],
    buffers: int,
    nbytes: int,
) -> None:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file({name: stored for name, (stored, _) in case.items()}, path)
    places = {name: torch.full(stored.shape, torch.nan, dtype=wanted) for name, (stored, wanted) in case.items()}
    told: list[int] = []
    copy_pieces(pieces_of(path, places, nbytes), late_ring(buffers, nbytes), told.append)
    for name, (stored, wanted) in case.items():
        assert torch.equal(places[name], stored.to(wanted)), name
    assert sum(told) == sum(stored.nbytes for stored, _ in case.values())


def test_parts_of_a_fused_tensor_fill_their_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    parts = {"q": torch.randn(7, 5), "k": torch.randn(3, 5), "v": torch.randn(3, 5)}
    save_file(parts, path)
    whole = torch.full((15, 5), torch.nan)
    places = dict(zip("qkv", whole[1:14].split([7, 3, 3])))
    copy_pieces(pieces_of(path, places, 24), late_ring(3, 24), lambda _: None)
    assert torch.equal(whole[1:14], torch.cat([parts["q"], parts["k"], parts["v"]]))
    assert whole[[0, 14]].isnan().all()


class MeetingBuffer(LateBuffer):
    """A buffer that reads only when all others read as well."""

    def __init__(self, nbytes: int, all_read: threading.Barrier) -> None:
        super().__init__(nbytes)
        self.all_read = all_read

    def fill(self, piece: Piece) -> None:
        self.all_read.wait()
        super().fill(piece)


def test_readers_work_at_the_same_time_and_leave_the_device_its_buffers(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(24.0)}, path)
    places = {"a": torch.zeros(24)}
    readers = 3
    all_read = threading.Barrier(readers, timeout=10)
    ring = [MeetingBuffer(8, all_read) for _ in range(readers + staging.SENDING)]
    copy_pieces(pieces_of(path, places, 8), ring, lambda _: None)
    assert torch.equal(places["a"], torch.arange(24.0))


def test_pieces_are_sent_in_order(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(64.0)}, path)
    sent: list[int] = []

    class Noting(StagingBuffer):
        def send(self, piece: Piece) -> None:
            sent.append(piece.start)
            super().send(piece)

    ring: Sequence[Buffer] = [Noting(12, CPU) for _ in range(4)]
    copy_pieces(pieces_of(path, {"a": torch.zeros(64)}, 12), ring, lambda _: None)
    assert sent == sorted(sent)
    assert len(sent) == math.ceil(64 / 3)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    pieces = pieces_of(path, {"a": torch.zeros(64)}, 16)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"model\.safetensors: ends within a;"):
        copy_pieces(pieces, late_ring(3, 16), lambda _: None)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, path)
    pieces = pieces_of(path, {"a": torch.zeros(64)}, 16)
    path.unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors: .*No such file"):
        copy_pieces(pieces, late_ring(3, 16), lambda _: None)


def test_loading_takes_a_bounded_part_of_the_host_memory() -> None:
    assert len(staging_ring(CPU)) * staging.BUFFER_BYTES <= 512 * 2**20


@pytest.mark.gpu
@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_a_gpu_gets_the_same(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Many more pieces than buffers, on a stream that is not the default one, as in the runtime."""
    path = tmp_path / "model.safetensors"
    values = (torch.randn(3_000_001) * 100).to(stored)
    save_file({"a": values}, path)
    device = torch.device("cuda")
    ring = [StagingBuffer(2**18, device) for _ in range(4)]
    with torch.cuda.stream(torch.cuda.Stream(device)):
        into = torch.full(values.shape, torch.nan, dtype=wanted, device=device)
        copy_pieces(pieces_of(path, {"a": into}, 2**18), ring, lambda _: None)
        assert torch.equal(into, values.to(device).to(wanted))
