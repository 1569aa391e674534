"""One format of results, one table, one kind of chart."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.plot import axis_for, line_chart, short
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


@pytest.mark.parametrize("log", [False, True])
def test_a_chart_is_an_svg_with_every_point_inside(log: bool) -> None:
    lines = {"a & b": [(1.0, 10.0), (512.0, 2000.0)], "c": [(3.0, 3.0)]}
    root = ElementTree.fromstring(line_chart(lines, title="<t>", x="x", y="y", log_x=log, log_y=log))
    kind = "{http://www.w3.org/2000/svg}"
    circles = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{kind}circle")]
    assert len(circles) == 3
    assert all(76 <= x <= 696 and 70 <= y <= 344 for x, y in circles)
    texts = [text.text for text in root.iter(f"{kind}text")]
    assert {"<t>", "a & b", "c"} <= set(texts)


def test_axes_end_with_ticks_and_never_divide_by_nothing() -> None:
    assert axis_for([3, 700], log=True).ticks == (1, 10, 100, 1000)
    assert axis_for([10], log=True).ticks == (10, 100)
    assert axis_for([0, 9.3], log=False).ticks == (0, 2, 4, 6, 8, 10)
    assert axis_for([0, 0], log=False).high > 0
    assert axis_for([0.3], log=False).share(0.0) == 0
    with pytest.raises(ValueError, match="nothing to draw"):
        line_chart({"a": []}, title="", x="", y="")
    assert [short(value) for value in (0.5, 20, 128000, 2.5e6)] == ["0.5", "20", "128k", "2.5M"]
