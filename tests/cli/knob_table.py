"""The table of all knobs in `aengine/cli/README.md`; `python -m tests.cli.knob_table` rewrites it."""

from __future__ import annotations

import re
from pathlib import Path

from aengine.cli.knobs import list_knobs, shown_default
from aengine.config import EngineConfig, ListenConfig, ServerConfig
from aengine.config.configure import flag

README = Path(__file__).parents[2] / "aengine" / "cli" / "README.md"
PLACE = re.compile(r"(?<=<!-- knobs -->\n).*(?=<!-- end of knobs -->)", re.S)
_TITLES = {ListenConfig: "Where to listen (`aengine serve`)", ServerConfig: "The API", EngineConfig: "The engine"}


def knob_table() -> str:
    """Return a table of knobs for each config."""
    lines = []
    for kind, title in _TITLES.items():
        lines += [f"\n### {title}\n", "| flag | value | default | what |", "|---|---|---|---|"]
        for knob in list_knobs(kind):
            values = ", ".join(f"`{choice}`" for choice in knob.choices) or f"{knob.kind or 'a switch'}"
            cells = (f"`{flag(knob.name)}`", values, shown_default(knob), knob.help)
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    README.write_text(PLACE.sub(lambda _: knob_table(), README.read_text()))
