"""Line charts as SVG, and a command that draws one from result files.

python bench/plot.py results.jsonl ... --x tok_s --y ttft_ms_p50 --by engine --out plot.svg
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

from bench.results import read_results

Point = tuple[float, float]

COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#5c5f66", "#c2255c", "#0b7285", "#e8a200")
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 70, 56
FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with a tick at each of `ticks`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool

    def share(self, value: float) -> float:
        """Where on the axis a value lies, 0 at its low end and 1 at its high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis_for(values: Iterable[float], log: bool) -> Axis:
    """An axis that begins and ends with a tick. A linear one begins at 0 (or below)."""
    seen = [value for value in values if not log or value > 0]
    if not seen:
        raise ValueError("there is nothing to draw")
    if log:
        least, most = math.floor(math.log10(min(seen)) + 1e-9), math.ceil(math.log10(max(seen)) - 1e-9)
        powers = range(least, max(most, least + 1) + 1)
        return Axis(10.0 ** powers[0], 10.0 ** powers[-1], tuple(10.0**power for power in powers), log=True)
    low, high = min(0.0, *seen), max(0.0, *seen)
    raw = (high - low or 1.0) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), max(math.ceil(high / step - 1e-9), 1)
    return Axis(first * step, last * step, tuple(step * place for place in range(first, last + 1)), log=False)


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
    points = [point for line in lines.values() for point in line]
    across, up = axis_for((a for a, _ in points), log_x), axis_for((b for _, b in points), log_y)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(point: Point) -> Point:
        return LEFT + across.share(point[0]) * wide, TOP + (1 - up.share(point[1])) * high

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' "
        f"role='img' aria-label='{escape(title, quote=True)}'>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#ffffff'/>",
        _text(LEFT, 24, title, size=15, weight=600),
    ]
    for tick in across.ticks:
        at, _ = place((tick, up.low))
        parts.append(f"<path d='M{at:.1f} {TOP}V{TOP + high}' stroke='#e9ecef'/>")
        parts.append(_text(at, TOP + high + 18, short(tick), anchor="middle"))
    for tick in up.ticks:
        _, at = place((across.low, tick))
        parts.append(f"<path d='M{LEFT} {at:.1f}H{LEFT + wide}' stroke='#e9ecef'/>")
        parts.append(_text(LEFT - 8, at + 4, short(tick), anchor="end"))
    parts.append(f"<path d='M{LEFT} {TOP}V{TOP + high}H{LEFT + wide}' fill='none' stroke='#868e96'/>")
    parts.append(_text(LEFT + wide / 2, HEIGHT - 20, x, anchor="middle"))
    middle = TOP + high / 2
    parts.append(_text(18, middle, y, anchor="middle", more=f" transform='rotate(-90 18 {middle})'"))
    if note:
        parts.append(_text(WIDTH - 6, HEIGHT - 5, note, anchor="end", size=10))
    legend = float(LEFT)
    for place_in, (name, line) in enumerate(lines.items()):
        colour = COLOURS[place_in % len(COLOURS)]
        shown = [place(p) for p in line if (p[0] > 0 or not log_x) and (p[1] > 0 or not log_y)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in shown)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [f"<circle cx='{a:.1f}' cy='{b:.1f}' r='3.5' fill='{colour}'/>" for a, b in shown]
        parts.append(f"<rect x='{legend:.0f}' y='41' width='14' height='4' fill='{colour}'/>")
        parts.append(_text(legend + 20, 47, name))
        legend += 44 + 6.6 * len(name)
    return "\n".join([*parts, "</svg>\n"])


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: int = 400, more: str = ""
) -> str:
    style = f"{FONT} font-size='{size}' font-weight='{weight}' fill='#343a40' text-anchor='{anchor}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}{more}>{escape(text)}</text>"


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
