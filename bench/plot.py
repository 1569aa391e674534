"""Line charts as SVG, drawn by matplotlib, and a command that draws one from result files.

pip install '.[bench]'
python bench/plot.py results.jsonl ... --x tok_s --y ttft_ms_p50 --by engine --out plot.svg
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

from bench.results import read_results

Point = tuple[float, float]

COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#5c5f66", "#c2255c", "#0b7285", "#e8a200")
STYLE = {
    "svg.hashsalt": "aengine",  # the same figures give the same file
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": "#343a40",
    "axes.labelcolor": "#343a40",
    "axes.edgecolor": "#868e96",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9ecef",
    "xtick.color": "#868e96",
    "ytick.color": "#868e96",
    "xtick.labelcolor": "#343a40",
    "ytick.labelcolor": "#343a40",
}


def short(value: float) -> str:
    """A tick's label: 128000 is 128k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.6g}"


def line_chart(
    lines: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    note: str = "",
) -> str:
    """An SVG with one line, and a point for each value, per name. Values that a log axis cannot show are left out.

    Raises `ValueError` if there are no points.
    """
    import matplotlib  # optional: needed for drawing only
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import LogLocator

    shown = {
        name: [(a, b) for a, b in line if (a > 0 or not log_x) and (b > 0 or not log_y)] for name, line in lines.items()
    }
    if not any(shown.values()):
        raise ValueError("there is nothing to draw")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06))
        axes = figure.add_subplot()
        axes.set_prop_cycle(color=COLOURS)
        for name, line in shown.items():
            axes.plot([a for a, _ in line], [b for _, b in line], marker="o", markersize=4, label=name)
        for axis, log, set_scale, set_limits in (
            (axes.xaxis, log_x, axes.set_xscale, axes.set_xlim),
            (axes.yaxis, log_y, axes.set_yscale, axes.set_ylim),
        ):
            if log:
                set_scale("log")
                axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
            elif axis.get_data_interval()[0] >= 0:
                set_limits(0)
            axis.set_major_formatter(lambda value, _: short(value))
        axes.minorticks_off()
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=26)
        axes.set(xlabel=x, ylabel=y)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(shown), frameon=False, borderaxespad=0.4)
        figure.supxlabel(note, x=0.985, ha="right", fontsize=7)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    return svg.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--x", required=True, help="a figure or a part of the case")
    parser.add_argument("--y", required=True)
    parser.add_argument("--by", nargs="+", required=True, help="parts of the case; each of their values gets a line")
    parser.add_argument("--log-x", action="store_true")
    parser.add_argument("--log-y", action="store_true")
    parser.add_argument("--title", default="")
    parser.add_argument("--x-label")
    parser.add_argument("--y-label")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results = read_results(options.files)
    lines: dict[str, list[Point]] = {}
    for result in results:
        values = {**result.case, **result.figures}
        at, height = values.get(options.x), values.get(options.y)
        if isinstance(at, (int, float)) and isinstance(height, (int, float)):
            lines.setdefault(" ".join(str(values.get(name, "-")) for name in options.by), []).append((at, height))
    if not lines:
        parser.error(f"no result has both {options.x} and {options.y}")
    chart = line_chart(
        lines,
        title=options.title or f"{options.y} against {options.x}",
        x=options.x_label or options.x.replace("_", " "),
        y=options.y_label or options.y.replace("_", " "),
        log_x=options.log_x,
        log_y=options.log_y,
        note=f"{results[0].origin.machine}, {results[0].origin.date}",
    )
    options.out.write_text(chart)


if __name__ == "__main__":
    main()
