"""Sums and gathers across the GPUs of one host: time, correctness, a comparison with NCCL, and a stress run.

Every GPU replays a CUDA graph of 72 calls, all launched by one thread. `--stress N` counts wrong results among N sums.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from aengine.kernels.collective.config import Pulled, Pushed
from aengine.kernels.elementwise import TritonNorm
from bench.all_reduce_stress import stress
from bench.ranks import CALLS, Call, Ranks, tensors
from bench.results import Report

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
HIDDEN, VOCAB = 4096, 151936

Config = Pushed | Pulled | None


def check(ranks: Ranks, rows: int, config: Config = None, hidden: int = HIDDEN) -> dict[str, float]:
    """Errors of a sum, with its norm, against float64, and how many elements differ between the ranks."""
    parts, residuals = tensors(ranks, rows, hidden, seed=1), tensors(ranks, rows, hidden, same=True, seed=2)
    weights = tensors(ranks, hidden, same=True, seed=3)
    ranks.wait()
    exact = sum((part.to(ranks.devices[0]).double() for part in parts), residuals[0].double())
    plain: list[Tensor] = [torch.empty(0)] * len(parts)
    fused: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(parts)
    norms = [TritonNorm(weight, 1e-6) for weight in weights]

    def sums(rank: int) -> None:
        plain[rank] = ranks.collectives[rank].sum(parts[rank].clone(), residuals[rank].clone(), config)

    def norm_sums(rank: int) -> None:
        fused[rank] = ranks.collectives[rank].sum_and_norm(parts[rank].clone(), residuals[rank].clone(), norms[rank])

    for call in (sums, norm_sums):
        ranks.rehearse(call)
        ranks.each(call)
    ranks.wait()
    normed = norms[0](plain[0])
    torch.cuda.synchronize(0)
    first = ranks.devices[0]
    return {
        "error": float((plain[0].double() - exact).norm() / exact.norm()),
        "unequal": sum(int((x.to(first) != plain[0]).sum()) for x in plain),
        "unequal_fused": sum(int((x.to(first) != plain[0]).sum()) for x, _ in fused),
        "unequal_normed": sum(int((y.to(first) != fused[0][1]).sum()) for _, y in fused),
        "unequal_norm_alone": int((fused[0][1] != normed).sum()),
    }


def sum_call(ranks: Ranks, rows: int, config: Config = None, hidden: int = HIDDEN) -> Call:
    parts = [tensors(ranks, rows, hidden, seed=i) for i in range(4 if rows <= 2048 else 1)]
    residuals = tensors(ranks, rows, hidden, same=True)
    return lambda rank, i: ranks.collectives[rank].sum(parts[i % len(parts)][rank], residuals[rank], config)


def norm_call(ranks: Ranks, rows: int, config: Pushed | None = None, hidden: int = HIDDEN, apart: bool = False) -> Call:
    """apart: the norm is a kernel of its own."""
    parts = [tensors(ranks, rows, hidden, seed=i) for i in range(4 if rows <= 2048 else 1)]
    residuals = tensors(ranks, rows, hidden, same=True)
    norms = [TritonNorm(weight, 1e-6) for weight in tensors(ranks, hidden, same=True)]
    if apart:
        return lambda rank, i: norms[rank](ranks.collectives[rank].sum(parts[i % len(parts)][rank], residuals[rank]))
    return lambda rank, i: ranks.collectives[rank].sum_and_norm(
        parts[i % len(parts)][rank], residuals[rank], norms[rank], config
    )


def gather_call(ranks: Ranks, rows: int, config: Config = None) -> Call:
    parts = tensors(ranks, rows, VOCAB // len(ranks.devices))
    return lambda rank, _: ranks.collectives[rank].gather(parts[rank], VOCAB, config)


def check_gather(ranks: Ranks, rows: int, config: Config = None) -> int:
    """How many elements are wrong."""
    parts = tensors(ranks, rows, VOCAB // len(ranks.devices))
    whole: list[Tensor] = [torch.empty(0)] * len(parts)

    def gathers(rank: int) -> None:
        whole[rank] = ranks.collectives[rank].gather(parts[rank], VOCAB, config)

    ranks.rehearse(gathers)
    ranks.each(gathers)
    ranks.wait()
    expected = torch.cat([part.cpu() for part in parts], dim=1)
    return sum(int((one.cpu() != expected).sum()) for one in whole)


def nccl_time(ranks: Ranks, rows: int) -> float:
    """Microseconds of the library's all-reduce, launched for all GPUs by this process."""
    parts = tensors(ranks, rows, HIDDEN)
    out = [torch.empty_like(part) for part in parts]
    for _ in range(5):
        torch.cuda.nccl.all_reduce(parts, out)
    ranks.wait()
    started = time.perf_counter()
    for _ in range(50):
        torch.cuda.nccl.all_reduce(parts, out)
    ranks.wait()
    return (time.perf_counter() - started) / 50 * 1e6


def measure(ranks: Ranks, report: Report, rows: Sequence[int]) -> None:
    count = len(ranks.devices)
    for n in rows:
        size = n * HIDDEN * 2
        calls = CALLS if n <= 2048 else 12
        report.tell(
            {"gpus": count, "rows": n, "KB": size / 1024},
            {
                "sum_us": ranks.time(sum_call(ranks, n), calls),
                "sum_and_norm_us": ranks.time(norm_call(ranks, n), calls),
                "sum_then_norm_us": ranks.time(norm_call(ranks, n, apart=True), calls),
                "nccl_us": nccl_time(ranks, n),
            },
            detail={**check(ranks, n), "failed": ranks.failed()},
        )
    for n in (1, 8, 64, 256):
        figures = {"gather_us": ranks.time(gather_call(ranks, n), 12), "wrong": check_gather(ranks, n)}
        report.tell({"gpus": count, "rows": n, "columns": VOCAB}, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="of 4,096 columns in bfloat16")
    parser.add_argument("--stress", type=int, metavar="N", help="sums, instead of measuring")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ranks, report = Ranks.connect(args.gpus), Report("all_reduce", args.out)
    if args.stress:
        report.tell({"gpus": args.gpus, "sums": args.stress}, stress(ranks, args.stress))
    else:
        measure(ranks, report, args.rows)
    report.print_table()


if __name__ == "__main__":
    main()
