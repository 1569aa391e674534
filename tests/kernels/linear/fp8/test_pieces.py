from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.fp8 import cublas_lt
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts, Side
from aengine.kernels.linear.fp8.quantize import E4M3
from aengine.model.slots import overwrite
from tests.kernels.conftest import relative_error
from tests.kernels.linear.fp8.reference import exact_product, random_inputs, random_weight

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
def test_parts_are_added_up_before_their_sum_is_rounded(
    count: int, m: int, rows: int, n: int, added: bool, device: torch.device
) -> None:
    parts = torch.randn(count, m, n, device=device).bfloat16()
    residual = torch.randn(rows, n, device=device).bfloat16() if added else None
    expected = (0 if residual is None else residual.double()) + parts[:, :rows].double().sum(0)
    out = fp8_library.add_up(parts, residual, rows)
    # Half of the last of eight bits, because the interpreter truncates.
    torch.testing.assert_close(out.double(), expected, rtol=1.01 * 2 ** (-8 if out.is_cuda else -7), atol=1e-6)
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
    xs = [random_inputs(m, k, device).to(dtype) for _ in range(3)]
    residual = torch.randn(m, n, device=device).to(dtype)
    x, buffer = torch.zeros_like(xs[0]), torch.empty_like(residual)

    def run(residual: Tensor | None) -> Tensor:
        rounded, scale = inputs.round_inputs(x, "group", multiple=library.multiple(m))
        out: Tensor = library(rounded, scale, residual, m, dtype)
        return out

    (pieces,) = (pieces for pieces in library._pieces if pieces.count == count)
    zeros, scale = inputs.round_inputs(x, "group", multiple=library.multiple(m))
    assert pieces(zeros, scale, weight.weight, dtype) is not None  # otherwise the library would take it whole
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(buffer)
    # Use other inputs each time, so that stale memory shows.
    for values in xs:
        x.copy_(values)
        expected = exact_product(values, weight)
        assert relative_error(run(None), expected) < 5e-3
        added = run(residual.clone())
        assert relative_error(added, expected + residual.double()) < 5e-3
        x.zero_()
        run(None)
        x.copy_(values)
        buffer.copy_(residual)
        graph.replay()
        assert torch.equal(buffer, added)


class Log:
    """Records the calls of streams in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream("main"))

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_event=lambda event: self.lines.append(f"{name} waits for {event.name}"))

    def event(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, record=lambda stream: self.lines.append(f"{stream.name} records {name}"))

    def side(self, index: int) -> Side:
        named = self.stream(f"side {index}"), self.event(f"beginning {index}"), self.event(f"end {index}")
        return Side(*cast("tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event]", named))

    def products(self, knows: bool = True) -> BlockProducts:
        def product(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, out: Tensor, stream: Any = None) -> bool:
            self.lines.append(f"{'main' if stream is None else stream.name} multiplies")
            scales = x_scale.t()[:, :, None], scale[:, : x_scale.shape[0]].repeat_interleave(128, 0)[:, :, None]
            xs, weights = (half.float().unflatten(1, (-1, 128)) for half in (x, weight))
            out.copy_((xs * scales[0]).flatten(1) @ (weights * scales[1]).flatten(1).t())
            return knows

        class Products(BlockProducts):
            def __call__(self, weight: Tensor, dtype: torch.dtype, *, bias: bool) -> Any:
                return product

        made = Products()
        made._sides[CPU] = [self.side(index) for index in range(3)]
        return made


def test_all_pieces_begin_after_earlier_work_and_end_before_later_work(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    weight, m = random_weight(128, 768, (128, 128), CPU), 4
    x8, x_scale = torch.randn(m, 768).to(E4M3), torch.rand(6, m)
    parts = fp8_library.Pieces(weight.scale, 3, log.products())(x8, x_scale, weight.weight, torch.float32)
    assert log.lines == [
        *("main records beginning 0", "main records beginning 1", "main multiplies"),
        *("side 0 waits for beginning 0", "side 0 multiplies", "side 0 records end 0", "main waits for end 0"),
        *("side 1 waits for beginning 1", "side 1 multiplies", "side 1 records end 1", "main waits for end 1"),
    ]
    x = (x8.float().unflatten(1, (6, 128)) * x_scale.t()[:, :, None]).flatten(1)
    scales = weight.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert relative_error(parts.sum(0), x.double() @ (weight.weight.double() * scales).t()) < 1e-5


def test_a_refusal_of_the_library_enqueues_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    weight = random_weight(128, 512, (128, 128), CPU)
    pieces = fp8_library.Pieces(weight.scale, 2, log.products(knows=False))
    assert pieces(torch.randn(4, 512).to(E4M3), torch.ones(4, 4), weight.weight, torch.float32) is None
    assert log.lines == ["main records beginning 0", "main multiplies"]


@pytest.mark.parametrize(
    ("rows", "dtype", "there", "cut"),
    [(68, torch.bfloat16, True, True), (64, torch.bfloat16, True, False), (68, torch.float32, True, False),
     (68, torch.bfloat16, False, False)],
)  # fmt: skip
def test_products_are_cut_where_the_library_takes_them(
    rows: int, dtype: torch.dtype, there: bool, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_lt, "_library", lambda device: object() if there else None)
    weight = random_weight(128, 10240, (128, 128), CPU)
    library = fp8_library.LibraryFp8(weight, None, BlockProducts())
    library._weight = SimpleNamespace(shape=weight.weight.shape, device=torch.device("cuda", 0))
    monkeypatch.setattr(fp8_library, "launch_for", lambda device: launch_for(CPU))
    assert library.cuts(rows, dtype) is cut


def test_products_that_the_library_refuses_in_pieces_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockProducts, "takes", lambda *_: True)
    weight = random_weight(128, 10240, (128, 128), CPU)
    library = fp8_library.LibraryFp8(weight, None, BlockProducts())
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
