"""One format of results, one table, one kind of chart."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.plot import line_chart, short
from bench.results import Report, read_results, table


def test_what_is_told_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.jsonl"
    report = Report("trial", file)
    report.tell({"batch": 1}, {"tok_s": 1234.5678}, runs={"tok_s": [1.0, 2.0]}, reference={"target": 1000.0})
    report.tell({"batch": 64}, {"tok_s": None, "late_ms": 0.01234567})
    assert read_results([file]) == report.results
    assert capsys.readouterr().out.splitlines() == file.read_text().splitlines()
    origin = report.results[0].origin
    assert origin.machine
    assert origin.command
    assert origin.date
    assert "torch" in origin.versions


def test_the_table_has_a_column_for_whatever_was_told() -> None:
    report = Report("trial")
    report.tell({"batch": 1}, {"tok_s": 1234.5}, reference={"target": None})
    report.tell({"batch": 64}, {"late_ms": 0.012345})
    assert table(report.results).splitlines() == [
        "| batch | tok s | target | late ms |",
        "|---|---|---|---|",
        "| 1 | 1,234 | - | - |",
        "| 64 | - | - | 0.0123 |",
    ]
    assert table(report.results, ["batch"]).splitlines()[-1] == "| 64 |"


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("log", [False, True])
def test_a_chart_is_an_svg_with_every_point_inside(log: bool) -> None:
    lines = {"a & b": [(1.0, 10.0), (512.0, 2000.0)], "c": [(3.0, 3.0)]}
    root = ElementTree.fromstring(line_chart(lines, title="<t>", x="x", y="y", log_x=log, log_y=log, note="here"))
    _, _, width, height = map(float, root.get("viewBox", "").split())
    points = [
        use
        for group in root.iter(f"{SVG}g")
        if group.get("id", "").startswith("line2d")
        for use in group.iter(f"{SVG}use")
    ]
    drawn = {(float(one.get("x", "")), float(one.get("y", ""))) for one in points}
    assert len(drawn) >= 3
    assert all(0 < x < width and 0 < y < height for x, y in drawn)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"<t>", "a & b", "c", "x", "y", "here"} <= texts
    assert {"500", "1k"} <= texts
    assert ("0" in texts) != log  # where a linear axis begins


def test_what_a_log_axis_cannot_show_is_left_out() -> None:
    kept = line_chart({"a": [(1.0, 1.0), (2.0, 3.0)]}, title="", x="", y="", log_y=True)
    assert line_chart({"a": [(1.0, 1.0), (1.5, 0.0), (2.0, 3.0)]}, title="", x="", y="", log_y=True) == kept


def test_the_same_figures_give_the_same_file() -> None:
    first, again = (line_chart({"a": [(1.0, 2.0)]}, title="t", x="x", y="y") for _ in range(2))
    assert first == again
    assert "date" not in first.lower()


def test_nothing_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        line_chart({"a": [(1.0, 0.0)]}, title="", x="", y="", log_y=True)
    assert [short(value) for value in (0.5, 20, 128000, 2.5e6)] == ["0.5", "20", "128k", "2.5M"]
