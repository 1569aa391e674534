"""Compares replicas on Ray Serve with one server. All run the demo model with one thread each on this machine.

    python bench/replicas.py --out replicas.jsonl
    python bench/replicas.py --shape 8b --gpus 1 --load alone 512-256 2048-32 shared-prefix --users 384 --requests 1152

All cases run at once and are measured in turns, `--rounds` times, so that other load on the machine affects all of
them. With `--gpus` (GPUs of each engine) they run one after another, on random weights of a published shape.

Loads: `alone`, one request after another, for the time to a first token; `512-64` and similar, distinct prompts with
these numbers of tokens in and out, for throughput; `shared-prefix`; `chat`. In chats, `found` is the share of cached
tokens relative to one server. `cpu_ms_...` is the CPU time of a role's processes in milliseconds for each output token.
`other_cores` counts the cores that other work used meanwhile. With `RAY_SERVE_ENABLE_HA_PROXY=1` Ray's proxy is
HAProxy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

from bench.results import Report, Result
from bench.serve import Load, at_concurrency, figures_of
from bench.shapes import SHAPES, SMALL, write_config
from bench.sse_client import Target, first_model
from bench.workloads import add_options, sessions

KNOBS = {"torch_threads": "1", "progress": "false", "max_model_len": "2048"}
GPU_KNOBS = {"load_format": "dummy", "progress": "false", "max_model_len": "8192"}
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
FIGURES = (
    *("ttft_ms_p50", "ttft_ms_p90", "requests_s", "output_tok_s", "cached_share", "failed"),
    *(f"cpu_ms_{role}" for role in (*ROLES, "client")),
    "other_cores",
)


@contextmanager
def one_server(port: int, knobs: Mapping[str, str]) -> Iterator[None]:
    flags = [
        word for name, value in knobs.items() if value != "false" for word in (f"--{name.replace('_', '-')}", value)
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
def on_ray(port: int, cases: Mapping[str, Mapping[str, str]], knobs: Mapping[str, str]) -> Iterator[None]:
    """Deploy each case as its own application, at `/0`, `/1`, ... of one proxy."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from aengine.ray_serve import build

    ray.init(num_cpus=8, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        for place, case in enumerate(cases.values()):
            serve.run(build(**knobs, **case), name=f"bench{place}", route_prefix=f"/{place}")
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


def busy_seconds() -> float:
    """CPU time of everything on this machine so far."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


async def measured(target: Target, workload: str, users: int, options: argparse.Namespace) -> dict[str, float | None]:
    model = await first_model(target)
    work = sessions(workload, options)
    load = Load(target, model, {}, 300.0)
    spent, busy, began, cpu = cpu_seconds(), busy_seconds(), time.perf_counter(), time.process_time()
    await at_concurrency(load, work, users)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    found = figures_of(load, wall, cpu, {})
    tokens = max(1, sum(reply.completion_tokens for reply in load.replies))
    took = {role: seconds - spent[role] for role, seconds in cpu_seconds().items()}
    others = busy_seconds() - busy - cpu - sum(took.values())
    costs = {f"cpu_ms_{role}": 1e3 * seconds / tokens for role, seconds in took.items()}
    return found | costs | {"cpu_ms_client": 1e3 * cpu / tokens, "other_cores": max(0.0, others / wall)}


async def figures(target: Target, load: str, options: argparse.Namespace, seed: int) -> dict[str, float | None]:
    shaped = argparse.Namespace(**{**vars(options), "seed": seed})
    if load == "alone":
        shaped.requests = options.alone
        found = await measured(target, "random-64-4", 1, shaped)
    elif load == "chat":
        found = await measured(target, "chat", 8, shaped)
    elif load == "shared-prefix":
        found = await measured(target, load, options.users, shaped)
    else:
        found = await measured(target, f"random-{load}", options.users, shaped)
    return {name: found.get(name) for name in FIGURES}


def ratios(results: Sequence[Result]) -> Iterator[str]:
    """Return the targets for replicas by load: medians of the rounds with their references."""
    rounds: dict[tuple[str, str], list[dict[str, float | None]]] = {}
    for result in results:
        rounds.setdefault((str(result.case["load"]), str(result.case["case"])), []).append(result.figures)
    values = {
        place: {name: median(one[name] or 0.0 for one in figures) for name in FIGURES}
        for place, figures in rounds.items()
    }
    for (load, case), figure in values.items():
        one, server = values.get((load, "1 replica")), values.get((load, "one server"))
        if load == "alone" and server is not None and case != "one server":
            more = [figure[name] - server[name] for name in ("ttft_ms_p50", "ttft_ms_p90")]
            yield f"{case}: first token {more[0]:+.1f} ms of one server's (p90 {more[1]:+.1f})"
        elif load == "chat" and server is not None and case != "one server":
            yield f"{case}: found {figure['cached_share'] / server['cached_share']:.1%} of what one server finds"
        elif load not in ("alone", "chat") and one is not None and case.startswith("2"):
            yield f"{case}, {load}: {figure['requests_s'] / one['requests_s']:.2f} times the throughput of one"


def measure(names: Sequence[str], knobs: Mapping[str, str], options: argparse.Namespace, report: Report) -> None:
    """All loads of cases that are there at once."""
    on = {name: case for name in names if (case := CASES[name]) is not None}
    targets = {name: Target(f"http://127.0.0.1:{options.port}/{place}", None) for place, name in enumerate(on)}
    with ExitStack() as stack:
        if "one server" in names:
            stack.enter_context(one_server(options.port + 1, knobs))
            targets["one server"] = Target(f"http://127.0.0.1:{options.port + 1}", None)
        if on:
            stack.enter_context(on_ray(options.port, on, {**knobs, "gpus": str(options.gpus)}))
        warm = argparse.Namespace(**{**vars(options), "requests": 12, "seed": options.seed - 1})
        for target in targets.values():
            asyncio.run(measured(target, "random-512-64", 8, warm))
        print("all are warm", file=sys.stderr, flush=True)
        for turn in range(options.rounds):  # one after the other, again and again: other work comes and goes
            for load in options.load:
                for name, target in targets.items():
                    if name == "one server" and load not in ("alone", "chat"):
                        continue  # throughput is held against one replica's
                    found = asyncio.run(figures(target, load, options, options.seed + turn))
                    report.tell({"load": load, "case": name, "round": turn}, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8799)
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--load", nargs="+", default=["alone", "512-64", "1024-16", "chat"], help="see above")
    parser.add_argument("--users", type=int, default=16, help="at once, of the loads by lengths")
    parser.add_argument("--alone", type=int, default=200, help="requests one after the other")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES, *SMALL], help="random weights; default: the demo model")
    parser.add_argument("--gpus", type=int, default=0, help="of each engine")
    add_options(parser)
    parser.set_defaults(requests=64)
    options = parser.parse_args()
    report = Report("replicas", options.out)
    with tempfile.TemporaryDirectory() as folder:
        knobs = KNOBS
        if options.shape is not None:
            write_config(Path(folder), options.shape)
            knobs = {"model": folder, **(GPU_KNOBS if options.gpus else KNOBS | {"load_format": "dummy"})}
        for cases in [[name] for name in options.case] if options.gpus else [options.case]:
            measure(cases, knobs, options, report)
    report.print_table()
    for line in ratios(report.results):
        print(line)


if __name__ == "__main__":
    main()
