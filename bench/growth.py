"""How cost grows: a step's time with the batch and with the context, the scheduler's with the queue and the cache.

    python bench/growth.py [--only batch context waiting cached] [--device cuda --shape 8b] [--plots bench/plots]

batch, context: decode steps of a model with random weights and an empty cache, launched one ahead as the engine does,
without prefill (a context of 128k tokens would take a CPU an hour). waiting, cached: a scheduler without a model, with
all rows and pages in use. One request leaves and one enters every other step. Figures are medians over steps, then
over runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.runner import LaunchedStep
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from aengine.step_plan import NewRow, PrefillChunk, StepPlan
from bench.growth_scheduler import StepCost, step_cost
from bench.plot import Point, line_chart
from bench.results import Report, Result
from bench.shapes import SHAPES, SMALL, write_config

PAGE = 16
STEPS = 24  # per measurement, at least
SECONDS = 1.0  # per measurement, if that is longer
MOST_STEPS = 400
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


class Decoding:
    """Rows that decode for ever, at about one context length."""

    def __init__(self, runtime: Runtime, batch: int, context: int) -> None:
        self._runner = runtime.runner
        self._rows = list(range(batch))
        self._step = 0
        pages = -(-(context + MOST_STEPS + 8) // PAGE)
        if batch * pages >= runtime.pool.num_pages:
            raise SystemExit(f"{batch} rows of {context} tokens need {batch * pages} pages: raise --pages")
        self._new = [
            NewRow(
                row=row,
                params=PARAMS,
                seed=row,
                stop_ids=(),
                prompt_len=context,
                tokens=[],
                length=context - 1,
                pages=list(range(1 + row * pages, 1 + (row + 1) * pages)),
            )
            for row in self._rows
        ]
        self._context = context

    def _launch(self, prefill: bool = False) -> LaunchedStep:
        plan = StepPlan(step=self._step, new_rows=[], new_pages=[], decode=[], prefill=[], page_copies=[])
        self._step += 1
        if prefill:  # all but the last token counts as cached
            plan.new_rows = self._new
            plan.prefill = [PrefillChunk(row, self._context - 1, [300], samples=True) for row in self._rows]
        else:
            plan.decode = list(self._rows)
        return self._runner.launch(plan)

    async def seconds_per_step(self) -> float:
        """The median time between the ends of steps."""
        await self._launch(prefill=True).result()
        previous, ends = self._launch(), list[float]()
        begin = time.perf_counter()
        while len(ends) < STEPS or (time.perf_counter() - begin < SECONDS and len(ends) < MOST_STEPS):
            step = self._launch()
            await previous.result()
            ends.append(time.perf_counter())
            previous = step
        await previous.result()
        return statistics.median(after - before for before, after in itertools.pairwise(ends[3:]))


async def device_growth(options: argparse.Namespace, report: Report) -> None:
    """Time per step against the batch and against the context."""
    cases = [("batch", batch, options.batch_context) for batch in options.batch if "batch" in options.only]
    cases += [("context", 1, context) for context in options.context if "context" in options.only]
    with tempfile.TemporaryDirectory() as scratch:
        longest = max(context for _, _, context in cases) + MOST_STEPS + 2 * PAGE
        write_config(Path(scratch), options.shape, longest)
        most = max(batch * -(-(context + MOST_STEPS + 8) // PAGE) for _, batch, context in cases) + 2
        config = EngineConfig(
            load_format="dummy",
            device=options.device,
            dtype="float32" if options.device == "cpu" else "bfloat16",
            num_pages=options.pages or most,
            max_num_seqs=max(batch for _, batch, _ in cases),
            max_model_len=longest,
            page_size=PAGE,
            progress=False,
        )
        runtime = start_runtime(config, Path(scratch), ModelConfig.from_folder(Path(scratch)))
        try:
            found: dict[tuple[str, int, int], list[float]] = {case: [] for case in cases}
            for _ in range(options.runs):
                for case, seconds in found.items():
                    seconds.append(1e3 * await Decoding(runtime, case[1], case[2]).seconds_per_step())
            for (sweep, batch, context), times in found.items():
                step = statistics.median(times)
                report.tell(
                    {"sweep": sweep, "device": options.device, "shape": options.shape, "batch": batch}
                    | {"context": context},
                    {"step_ms": step, "tok_s": 1e3 * batch / step},
                    runs={"step_ms": times},
                )
        finally:
            runtime.runner.close()


def scheduler_growth(options: argparse.Namespace, report: Report) -> None:
    """Scheduler time per step against the queue and against the tree."""
    cases = [("waiting", count, 256) for count in options.counts if "waiting" in options.only]
    cases += [("cached", 32, count) for count in options.counts if "cached" in options.only]
    found: dict[tuple[str, int, int], list[StepCost]] = {case: [] for case in cases}
    for _ in range(options.runs):  # in turns: whatever else the machine does hits all alike
        for case, costs in found.items():
            costs.append(step_cost(case[1], case[2]))
    for (sweep, waiting, cached), costs in found.items():
        report.tell(
            {"sweep": sweep, "waiting": waiting, "cached_nodes": cached},
            {
                "step_us": statistics.median(cost.step for cost in costs),
                "step_us_mean": statistics.median(cost.step_mean for cost in costs),
                "step_us_p99": statistics.median(cost.step_p99 for cost in costs),
                "add_us": statistics.median(cost.add for cost in costs),
            },
            runs={"step_us": [cost.step for cost in costs]},
        )


def _points(results: list[Result], sweep: str, x: str, y: str) -> list[Point]:
    chosen = [result for result in results if result.case["sweep"] == sweep]
    return [(float(result.case[x]), result.figures[y] or 0.0) for result in chosen]


def draw(results: list[Result], folder: Path, name: str) -> None:
    """Write the plots, growth-*.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    where = f"{results[0].origin.machine}, {results[0].origin.date}"
    batch, context = _points(results, "batch", "batch", "step_ms"), _points(results, "context", "context", "step_ms")
    if batch:
        title = f"Time per decode step against the batch ({name})"
        lines = {"step": batch, "step / batch": [(size, step / size) for size, step in batch]}
        chart = line_chart(lines, title=title, x="sequences in the batch", y="ms", log_x=True, log_y=True, note=where)
        (folder / f"growth-batch-{name}.svg").write_text(chart)
    if context:
        title = f"Time per decode step against the context ({name}, one sequence)"
        chart = line_chart({"step": context}, title=title, x="tokens of context", y="ms", log_x=True, note=where)
        (folder / f"growth-context-{name}.svg").write_text(chart)
    queue = _points(results, "waiting", "waiting", "step_us"), _points(results, "waiting", "waiting", "add_us")
    tree = _points(results, "cached", "cached_nodes", "step_us")
    lines = {
        "step, requests waiting": queue[0],
        "step, radix nodes cached": tree,
        "one add, requests waiting": queue[1],
    }
    if any(lines.values()):
        chart = line_chart(
            {label: line for label, line in lines.items() if line},
            title="Scheduler time per step (32 rows decode, one enters every other step)",
            x="requests waiting, or radix nodes cached",
            y="us, median",
            log_x=True,
            note=where,
        )
        (folder / "growth-scheduler.svg").write_text(chart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sweeps = ["batch", "context", "waiting", "cached"]
    parser.add_argument("--only", nargs="+", choices=sweeps, default=sweeps)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=[*SMALL, *SHAPES], default="30m")
    parser.add_argument("--batch", type=int, nargs="+", default=[2**power for power in range(10)])
    parser.add_argument("--batch-context", type=int, default=128, help="tokens of context in the batch sweep")
    parser.add_argument("--context", type=int, nargs="+", default=[1024 * 2**power for power in range(8)])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--pages", type=int, help="KV pages; default: what the largest case needs")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plots", type=Path, help="a folder for the SVGs")
    options = parser.parse_args()
    report = Report("growth", options.out)
    if {"batch", "context"} & set(options.only):
        asyncio.run(device_growth(options, report))
    if {"waiting", "cached"} & set(options.only):
        scheduler_growth(options, report)
    report.print_table()
    if options.plots:
        draw(report.results, options.plots, f"{options.shape}-{options.device.split(':')[0]}")


if __name__ == "__main__":
    main()
