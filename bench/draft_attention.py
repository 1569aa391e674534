"""Time decode attention of rows that verify drafts: several query tokens of each row read its pages once."""

from __future__ import annotations

import torch

from aengine.kernels.attention.config import DecodeConfig
from aengine.kernels.attention.decode_attention import PagedDecode
from bench.kernel_step import DECODE_CONFIGS
from bench.kernel_timing import DEVICE, Heads, Pool, Report, attempt, brief, floor, graph_time, random_half

QUERIES = (1, 2, 3, 5)
ROWS = (1, 16, 64, 256)
CONTEXTS = (512, 4096, 32768)
MOST_TOKENS = 2**21  # of the pool: 8 GiB of keys and values of the 8B's layer


def draft_time(pool: Pool, heads: Heads, rows: int, context: int, queries: int, config: DecodeConfig | None) -> float:
    decode, q = PagedDecode(), random_half(rows * queries, heads.heads, heads.dim)
    out = torch.empty_like(q)
    lens = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
    tables = pool.tables(rows, context)
    calls = [
        lambda t=t: decode(q, pool.k, pool.v, t, lens, 0.09, config=config, out=out, queries=queries) for t in tables
    ]
    return graph_time(calls * max(1, 16 // len(calls)))


def bench_draft_attention(report: Report, sweep: bool) -> None:
    """One to five queries of each row at the 8B's shape. The fraction is of the device's memory speed."""
    heads = Heads()
    pool = Pool(MOST_TOKENS // 16 + 1, heads)
    configs = [None, *DECODE_CONFIGS] if sweep else [None]
    for rows in ROWS:
        for context in CONTEXTS:
            if rows * context > MOST_TOKENS:
                continue
            size = rows * context * heads.kv_heads * heads.dim * 4
            for queries in QUERIES:
                results = []
                for config in configs:
                    results += attempt(
                        lambda config=config: draft_time(pool, heads, rows, context, queries, config), config
                    )
                for us, config in results:
                    case = f"{rows}x{context} {queries} queries"
                    report.add("drafts", case, us, size, variant=brief(config))
                best = "; ".join(
                    f"{us:.1f} us ({floor(size) / us:.0%}) {brief(cut)}"
                    for us, cut in sorted(results, key=lambda result: result[0])[:3]
                )
                report.say(f"drafts {rows:3}x{context:<5} {queries} queries floor {floor(size):7.1f}; {best}")
    torch.cuda.empty_cache()
