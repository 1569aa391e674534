"""A load generator for any OpenAI-compatible server: throughput, latency, goodput under an SLO, failures.

    python bench/serve.py --url http://127.0.0.1:8000 --engine aengine --workload random-128-128 \\
        --concurrency 1 8 64 --slo ttft=200 tpot=50 --out aengine.jsonl --plot serve.svg [--against peer.jsonl]

Load is a request rate (`--rate 2 8 inf`: Poisson arrivals, per second) or a number of users at once
(`--concurrency`); each value is one measurement. Sessions of the chat workload count as one arrival each. Tokens are
counted by the server's `usage`, never by events. TTFT: from before the connection is opened to the first
text; TPOT: (last text - first text) / (tokens - 1); ITL: gaps between events with text; E2E: to the end of the
stream. `client_cpu` is the share of a core that this process took: near 1 it would measure itself
(`bench/null_server.py` shows what it can take).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

from bench.plot import Point, line_chart
from bench.results import Report, Result, read_results
from bench.sse_client import Reply, Target, ask, first_model
from bench.workloads import STANDARD, Session, Turn, add_options, sessions

COLUMNS = (
    "engine",
    "workload",
    "load",
    "requests",
    "failed",
    "output_tok_s",
    "requests_s",
    "goodput_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "itl_ms_p99",
    "e2e_ms_p50",
    "client_cpu",
)


@dataclass
class Load:
    """Sends requests to a server and collects the replies."""

    target: Target
    model: str
    extra: dict[str, object]
    patience: float
    replies: list[Reply] = field(default_factory=list)
    late: list[float] = field(default_factory=list)  # seconds by which arrivals missed their time

    async def run(self, session: Session) -> None:
        """Ask the questions of one session, one after the other."""
        messages = [] if session.system is None else [{"role": "system", "content": session.system}]
        for turn in session.turns:
            await asyncio.sleep(turn.think)
            request = self.request(session, turn, messages)
            reply = await ask(self.target, request, patience=self.patience, keep_text=session.system is not None)
            self.replies.append(reply)
            if reply.failed is not None:
                return
            messages.append({"role": "assistant", "content": "".join(reply.text)})

    def request(self, session: Session, turn: Turn, messages: list[dict[str, str]]) -> bytes:
        """The bytes of one request; a chat's question joins its messages."""
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": turn.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        body = {name: value for name, value in body.items() if value is not None}
        if session.system is None:
            return self.target.request("POST", "/v1/completions", msgspec.json.encode({**body, "prompt": turn.prompt}))
        messages.append({"role": "user", "content": str(turn.prompt)})
        return self.target.request("POST", "/v1/chat/completions", msgspec.json.encode({**body, "messages": messages}))


async def at_rate(load: Load, work: Sequence[Session], rate: float, seed: int) -> None:
    """Sessions arrive by a Poisson process; `inf`: all at once."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    due = loop.time()
    async with asyncio.TaskGroup() as group:
        for session in work:
            await asyncio.sleep(due - loop.time())
            load.late.append(loop.time() - due)
            group.create_task(load.run(session))
            due += 0.0 if math.isinf(rate) else rng.expovariate(rate)


async def at_concurrency(load: Load, work: Sequence[Session], users: int) -> None:
    """So many users, each of whom starts a session when the last one is over."""
    todo = iter(work)

    async def user() -> None:
        for session in todo:
            await load.run(session)

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, with linear interpolation."""
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def summary(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds."""
    values = sorted(1e3 * value for value in seconds)
    shown: dict[str, float | None] = {f"{name}_ms_mean": sum(values) / len(values) if values else None}
    for percent in (50, 90, 99):
        shown[f"{name}_ms_p{percent}"] = percentile(values, percent) if values else None
    return shown


def meets(reply: Reply, slo: dict[str, float]) -> bool:
    """Whether a reply kept every bound (milliseconds)."""
    seen = {"ttft": reply.ttft, "tpot": reply.tpot or 0.0, "e2e": reply.e2e, "itl": max(reply.gaps, default=0.0)}
    return all(1e3 * seen[name] <= bound for name, bound in slo.items())


def figures_of(load: Load, wall: float, cpu: float, slo: dict[str, float]) -> dict[str, float | None]:
    """All that is reported of one measurement."""
    good = [reply for reply in load.replies if reply.failed is None]
    asked = sum(reply.prompt_tokens for reply in good)
    drawn = sum(reply.completion_tokens for reply in good)
    events = sum(len(reply.times) for reply in good)
    return {
        "requests": len(load.replies),
        "failed": len(load.replies) - len(good),
        "duration_s": wall,
        "requests_s": len(good) / wall,
        "input_tok_s": asked / wall,
        "output_tok_s": drawn / wall,
        "total_tok_s": (asked + drawn) / wall,
        "goodput_s": sum(meets(reply, slo) for reply in good) / wall if slo else None,
        **summary("ttft", [reply.ttft for reply in good]),
        **summary("tpot", [tpot for reply in good if (tpot := reply.tpot) is not None]),
        **summary("itl", [gap for reply in good for gap in reply.gaps]),
        **summary("e2e", [reply.e2e for reply in good]),
        "tokens_per_event": drawn / events if events else None,
        "cached_share": sum(reply.cached_tokens for reply in good) / asked if asked else None,
        "late_ms_p99": 1e3 * percentile(sorted(load.late), 99) if load.late else None,
        "client_cpu": cpu / wall,
    }


async def measure(options: argparse.Namespace, report: Report) -> None:
    target = Target(options.url.removesuffix("/v1"), os.environ.get("OPENAI_API_KEY"))
    model = options.model or await first_model(target)
    extra = msgspec.json.decode(options.extra, type=dict[str, object])
    slo = {name: float(bound) for name, bound in (pair.split("=") for pair in options.slo)}
    if unknown := set(slo) - {"ttft", "tpot", "itl", "e2e"}:
        raise SystemExit(f"--slo: {', '.join(unknown)} is none of ttft, tpot, itl, e2e")
    for workload in options.workload:
        work = sessions(workload, options)
        warm = sessions(workload, argparse.Namespace(**{**vars(options), "seed": options.seed + 1}))
        await at_concurrency(Load(target, model, extra, options.timeout), warm[: options.warmup], 1)
        points = [("rate", rate) for rate in options.rate] or [("users", users) for users in options.concurrency]
        for kind, value in points:
            load = Load(target, model, extra, options.timeout)
            gc.collect()
            gc.disable()  # its pauses would be seen as the server's
            began, cpu = time.perf_counter(), time.process_time()
            if kind == "rate":
                await at_rate(load, work, value, options.seed)
            else:
                await at_concurrency(load, work, int(value))
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            gc.enable()
            figures = figures_of(load, wall, cpu, slo)
            reasons = Counter(reply.failed for reply in load.replies if reply.failed)
            report.tell(
                {"engine": options.engine, "workload": workload, "load": f"{kind} {value:g}"},
                figures,
                detail={"model": model, "slo_ms": slo, "failures": dict(reasons.most_common(3))},
            )
            if cpu > 0.8 * wall:
                print(f"the load generator took {cpu / wall:.0%} of a core: it measures itself", file=sys.stderr)


def draw(results: Sequence[Result]) -> str:
    """Throughput against latency: one line per engine and workload, one point per load, from the lightest on."""
    lines: dict[str, list[Point]] = {}
    several = len({result.case["workload"] for result in results}) > 1
    for result in sorted(results, key=lambda result: float(str(result.case["load"]).split()[1])):
        throughput, latency = result.figures["output_tok_s"], result.figures["e2e_ms_p50"]
        if throughput is not None and latency is not None:
            name = f"{result.case['engine']} {result.case['workload']}" if several else str(result.case["engine"])
            lines.setdefault(name, []).append((throughput, latency / 1e3))
    workloads = ", ".join(dict.fromkeys(str(result.case["workload"]) for result in results))
    return line_chart(
        lines,
        title=f"Throughput against latency: {workloads}",
        x="output tokens per second",
        y="seconds per request, median",
        log_y=True,
        note=f"{results[0].origin.machine}, {results[0].origin.date}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--engine", default="aengine", help="the name of its line in the plot")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--workload", nargs="+", default=["random-128-128"], help=f"{', '.join(STANDARD)}, random-I-O")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--rate", type=float, nargs="+", default=[], help="sessions per second; inf: all at once")
    kind.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--slo", nargs="*", default=[], help="ttft=200 tpot=50 itl=... e2e=..., in ms")
    parser.add_argument("--extra", default="{}", help="JSON that joins every body; null takes a field out of it")
    parser.add_argument("--warmup", type=int, default=2, help="sessions before the first measurement")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per request")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--plot", type=Path, help="SVG")
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="results of other engines for the plot")
    add_options(parser)
    options = parser.parse_args()
    report = Report("serve", options.out)
    asyncio.run(measure(options, report))
    report.print_table(COLUMNS)
    if options.plot:
        results = [*report.results, *read_results(options.against)]
        if all(result.figures["e2e_ms_p50"] is None for result in results):
            raise SystemExit(
                f"--plot: no request succeeded, so there is nothing to draw; {options.plot} is not written"
            )
        options.plot.write_text(draw(results))


if __name__ == "__main__":
    main()
