from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
from aengine.kernels.linear.fp8.quantize import E4M3
from aengine.model.overwrite import overwrite
from tests.kernels.conftest import relative_error
from tests.kernels.linear.fp8.reference import exact_product, random_inputs, random_weight

fp8_pieces = pytest.importorskip("aengine.kernels.linear.fp8.pieces")
fp8_library = pytest.importorskip("aengine.kernels.linear.fp8.library")
inputs = pytest.importorskip("aengine.kernels.linear.fp8.inputs")
CPU = torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "m", "rows", "n"),
    [
        pytest.param(3, 8, 5, 48, id="tiny"),
        pytest.param(2, 4, 4, 16, id="tiny-all"),
        (2, 256, 129, 4096),
        (4, 68, 65, 5120),
    ],
)
@pytest.mark.parametrize("added", [False, True])
def test_parts_are_added_up_and_rounded_once(
    count: int, m: int, rows: int, n: int, added: bool, device: torch.device
) -> None:
    parts = torch.randn(count, m, n, device=device).bfloat16()
    residual = torch.randn(rows, n, device=device).bfloat16() if added else None
    expected = (0 if residual is None else residual.float()) + sum(part.float() for part in parts[:, :rows])
    out = fp8_pieces.add_up(parts, residual, rows)
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-7, atol=1e-6)
    assert residual is None or out is residual


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "k", "count"),
    [(65, 4096, 12288, 3), (96, 4096, 14336, 4), (128, 5120, 25600, 2), (160, 4096, 12288, 2), (256, 4096, 4096, 2)],
)
def test_pieces_side_by_side_give_the_product_in_graphs_as_without(
    m: int, n: int, k: int, count: int, dtype: torch.dtype, device: torch.device
) -> None:
    if launch_for(device).capability[0] != 9:
        pytest.skip("cuBLAS knows these blocks on Hopper alone")
    weight = random_weight(n, k, (128, 128), device)
    library = fp8_library.LibraryFp8(weight, None, BlockProducts())
    x, residual = random_inputs(m, k, device).to(dtype), torch.randn(m, n, device=device).to(dtype)

    def run(residual: Tensor | None) -> Tensor:
        rounded, scale = inputs.round_inputs(x, "group", multiple=library.multiple(m))
        (pieces,) = (pieces for pieces in library._pieces if pieces.count == count)
        assert pieces(rounded, scale, weight.weight, dtype) is not None  # else the library would take it whole
        out: Tensor = library(rounded, scale, residual, m, dtype)
        return out

    expected = exact_product(x, weight)
    assert relative_error(run(None), expected) < 5e-3
    added = run(residual.clone())
    assert relative_error(added, expected + residual.double()) < 5e-3
    graph, buffer = torch.cuda.CUDAGraph(), residual.clone()
    with torch.cuda.graph(graph):
        run(buffer)
    for _ in range(3):
        buffer.copy_(residual)
        graph.replay()
        assert torch.equal(buffer, added)


class Log:
    """What streams were asked for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.current = "main"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream("main"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    def stream(self, name: str) -> SimpleNamespace:
        def record() -> str:
            self.lines.append(f"{name} records")
            return f"{name}'s event"

        return SimpleNamespace(
            name=name,
            record_event=record,
            wait_event=lambda event: self.lines.append(f"{name} waits for {event}"),
            wait_stream=lambda other: self.lines.append(f"{name} waits for {other.name}"),
        )

    @contextlib.contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        self.current, before = stream.name, self.current
        yield
        self.current = before

    def products(self, knows: bool = True) -> SimpleNamespace:
        def product(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, out: Tensor) -> bool:
            self.lines.append(f"{self.current} multiplies")
            scales = x_scale.t()[:, :, None], scale[:, : x_scale.shape[0]].repeat_interleave(128, 0)[:, :, None]
            xs, weights = (half.float().unflatten(1, (-1, 128)) for half in (x, weight))
            out.copy_((xs * scales[0]).flatten(1) @ (weights * scales[1]).flatten(1).t())
            return knows

        class Products(SimpleNamespace):
            def __call__(self, weight: Tensor, dtype: torch.dtype, *, bias: bool) -> object:
                return product

        return Products(sides=lambda device, count: [self.stream(f"side {side}") for side in range(count)])


def test_all_pieces_begin_behind_what_was_enqueued_and_end_before_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    weight, m = random_weight(128, 768, (128, 128), CPU), 4
    x8, x_scale = torch.randn(m, 768).to(E4M3), torch.rand(6, m)
    parts = fp8_pieces.Pieces(weight.scale, 3, log.products())(x8, x_scale, weight.weight, torch.float32)
    assert log.lines == [
        *("main records", "main multiplies"),
        *("side 0 waits for main's event", "side 0 multiplies", "main waits for side 0"),
        *("side 1 waits for main's event", "side 1 multiplies", "main waits for side 1"),
    ]
    x = (x8.float().unflatten(1, (6, 128)) * x_scale.t()[:, :, None]).flatten(1)
    scales = weight.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert relative_error(parts.sum(0), x.double() @ (weight.weight.double() * scales).t()) < 1e-5


def test_what_the_library_refuses_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    weight = random_weight(128, 512, (128, 128), CPU)
    pieces = fp8_pieces.Pieces(weight.scale, 2, log.products(knows=False))
    assert pieces(torch.randn(4, 512).to(E4M3), torch.ones(4, 4), weight.weight, torch.float32) is None
    assert log.lines == ["main records", "main multiplies"]


def test_without_the_library_a_product_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(128, 10240, (128, 128), CPU)
    library = fp8_library.LibraryFp8(weight, None, BlockProducts())
    assert library.cuts(68)
    assert not library.cuts(64)
    whole = torch.zeros(68, 128)
    monkeypatch.setattr(fp8_library.LibraryFp8, "_by_torch", lambda *_: whole)
    out = library(torch.zeros(68, 10240).to(E4M3), torch.ones(80, 68), torch.ones(68, 128), 68, torch.float32)
    assert torch.equal(out, torch.ones(68, 128))


def test_scales_of_pieces_are_replaced_with_the_weight() -> None:
    products = BlockProducts()
    weights = [random_weight(128, 10240, (128, 128), CPU) for _ in range(2)]
    kept, made = (fp8_library.LibraryFp8(weight, None, products) for weight in weights)
    assert kept._pieces
    overwrite(kept, made)
    for ours, theirs in zip(kept._pieces, made._pieces):
        assert all(torch.equal(*pair) for pair in zip(ours._scales, theirs._scales))
