"""Replicas on Ray Serve beside one server, all of them the demo model with one thread each, on this machine's cores.

    python bench/replicas.py --out replicas.jsonl

All cases are there at once and measured in turns, `--rounds` times, so that what else a machine does meets them alike.
Throughput: distinct prompts, 16 users. `cpu_ms_...`: CPU time of a role's processes, milliseconds a token of output; it
depends less on what else runs than throughput does. Chats: `found` is what share of the tokens that one server has
cached the replicas have cached together, when each turn goes where the router sends it. TTFT: one request after the
other. With `RAY_SERVE_ENABLE_HA_PROXY=1` Ray's proxy is HAProxy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
ROLES = {  # what the processes' command lines have in them
    "engine": (":engine", "aengine serve"),
    "ingress": (":ingress",),
    "proxy": ("ProxyActor", "haproxy", "HAProxyManager"),
    "ray": ("ServeController", "raylet", "gcs_server"),
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
def on_ray(port: int, cases: dict[str, dict[str, str]]) -> Iterator[None]:
    """Each case an application of its own, at `/0`, `/1`, ... behind one proxy."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from aengine.ray_serve import build

    ray.init(num_cpus=8, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        for place, knobs in enumerate(cases.values()):
            serve.run(build(**KNOBS, **knobs), name=f"bench{place}", route_prefix=f"/{place}")
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def cpu_seconds() -> dict[str, float]:
    """CPU time of all processes of a role so far; what Ray itself runs, its controller and daemons, is `ray`."""
    spent = dict.fromkeys(ROLES, 0.0)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_text().replace("\0", " ")
            role = next((role for role, words in ROLES.items() if any(word in command[:200] for word in words)), None)
            if role is not None:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                spent[role] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue  # it has ended
    return spent


async def measured(target: Target, workload: str, users: int, options: argparse.Namespace) -> dict[str, float | None]:
    model = await first_model(target)
    work = sessions(workload, options)
    load = Load(target, model, {}, 300.0)
    spent, began, cpu = cpu_seconds(), time.perf_counter(), time.process_time()
    await at_concurrency(load, work, users)
    found = figures_of(load, time.perf_counter() - began, time.process_time() - cpu, {})
    tokens = max(1, sum(reply.completion_tokens for reply in load.replies))
    now = cpu_seconds()
    return found | {f"cpu_ms_{role}": 1e3 * (now[role] - spent[role]) / tokens for role in ROLES}


async def figures(target: Target, options: argparse.Namespace, seed: int) -> dict[str, float | None]:
    def shaped(**fields: object) -> argparse.Namespace:
        return argparse.Namespace(**{**vars(options), "seed": seed, **fields})

    alone = await measured(target, "random-64-4", 1, shaped(requests=40))
    many = await measured(target, f"random-{options.lengths}", 16, shaped())
    chats = await measured(target, "chat", 8, shaped()) if options.chats else {}
    return {
        "ttft_ms_p50": alone["ttft_ms_p50"],
        "ttft_ms_p90": alone["ttft_ms_p90"],
        "requests_s": many["requests_s"],
        "output_tok_s": many["output_tok_s"],
        **{name: many[name] for name in ("client_cpu", *(f"cpu_ms_{role}" for role in ROLES))},
        "cached_share": chats.get("cached_share"),
        "failed": sum(one.get("failed") or 0 for one in (alone, many, chats)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8799)
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--lengths", default="512-64", help="throughput: tokens in and out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    add_options(parser)
    options = parser.parse_args()
    report = Report("replicas", options.out)
    on = {name: knobs for name, knobs in CASES.items() if knobs is not None and name in options.case}
    targets = {name: Target(f"http://127.0.0.1:{options.port}/{place}", None) for place, name in enumerate(on)}
    with ExitStack() as stack:
        if "one server" in options.case:
            stack.enter_context(one_server(options.port + 1))
            targets["one server"] = Target(f"http://127.0.0.1:{options.port + 1}", None)
        stack.enter_context(on_ray(options.port, on))
        for target in targets.values():
            asyncio.run(measured(target, "random-512-64", 8, argparse.Namespace(**{**vars(options), "requests": 12})))
        for turn in range(options.rounds):  # one after the other, again and again: other work comes and goes
            for name, target in targets.items():
                report.tell({"case": name, "round": turn}, asyncio.run(figures(target, options, options.seed + turn)))
    report.print_table()
    found: dict[str, list[float]] = {name: [] for name in targets}
    for result in report.results:
        found[str(result.case["case"])].append(result.figures["cached_share"] or 0)
    if options.chats and (reference := sum(found.get("one server", []))):
        for name, shares in found.items():
            print(f"{name}: found {sum(shares) / reference:.1%} of what one server finds")


if __name__ == "__main__":
    main()
