"""Replicas on Ray Serve beside one server, all of them the demo model with one thread each, on this machine's cores.

    python bench/replicas.py --out replicas.jsonl

Throughput: distinct prompts, 16 users. Chats: `found` is what share of the tokens that one server has cached the
replicas have cached together, when each turn goes where the router sends it. TTFT: one request after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

from bench.results import Report
from bench.serve import Load, at_concurrency, figures_of
from bench.sse_client import Target, first_model
from bench.workloads import add_options, sessions

KNOBS = {"torch_threads": "1", "progress": "false", "max_model_len": "2048"}
CASES = {
    "one server": None,
    "1 replica": {"replicas": "1"},
    "2 replicas": {"replicas": "2"},
    "2 replicas, random": {"replicas": "2", "routing": "random"},
}


@contextmanager
def one_server(port: int) -> Iterator[None]:
    flags = [
        word for name, value in KNOBS.items() if value != "false" for word in (f"--{name.replace('_', '-')}", value)
    ]
    command = [sys.executable, "-m", "aengine", "serve", "--port", str(port), "--no-progress", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        if process.stdout is None or not any(line.startswith("Serving on") for line in process.stdout):
            raise SystemExit("the server did not start")
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def on_ray(port: int, knobs: dict[str, str]) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from aengine.ray_serve import build

    ray.init(num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        serve.run(build(**KNOBS, **knobs), name="bench", route_prefix="/")
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


async def measured(target: Target, workload: str, users: int, options: argparse.Namespace) -> dict[str, float | None]:
    model = await first_model(target)
    work = sessions(workload, options)
    load = Load(target, model, {}, 120.0)
    began, cpu = time.perf_counter(), time.process_time()
    await at_concurrency(load, work, users)
    return figures_of(load, time.perf_counter() - began, time.process_time() - cpu, {})


async def figures(port: int, options: argparse.Namespace) -> dict[str, float | None]:
    target = Target(f"http://127.0.0.1:{port}", None)

    def shaped(**fields: object) -> argparse.Namespace:
        return argparse.Namespace(**{**vars(options), **fields})

    await measured(target, "random-512-64", 4, shaped(requests=8, seed=99))  # warm
    alone = await measured(target, "random-64-4", 1, shaped(requests=60))
    many = await measured(target, f"random-{options.lengths}", 16, shaped(requests=options.requests))
    chats = await measured(target, "chat", 8, options)
    return {
        "ttft_ms_p50": alone["ttft_ms_p50"],
        "ttft_ms_p90": alone["ttft_ms_p90"],
        "requests_s": many["requests_s"],
        "output_tok_s": many["output_tok_s"],
        "client_cpu": many["client_cpu"],
        "cached_share": chats["cached_share"],
        "failed": sum(one["failed"] or 0 for one in (alone, many, chats)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8799)
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--lengths", default="512-64", help="throughput: tokens in and out")
    parser.add_argument("--out", type=Path)
    add_options(parser)
    options = parser.parse_args()
    report = Report("replicas", options.out)
    for name in options.case:
        knobs = CASES[name]
        with one_server(options.port) if knobs is None else on_ray(options.port, knobs):
            report.tell({"case": name}, asyncio.run(figures(options.port, options)))
    found = {str(result.case["case"]): result.figures for result in report.results}
    report.print_table()
    if (reference := found.get("one server", {}).get("cached_share")) is not None:
        for name, values in found.items():
            print(f"{name}: found {(values['cached_share'] or 0) / reference:.1%} of what one server finds")


if __name__ == "__main__":
    main()
