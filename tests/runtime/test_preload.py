"""torch's libraries are linked before torch is imported, and the import finds them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, threading, time
from aengine.runtime.preload import link_torch
linking, turns = threading.Thread(target=link_torch), 0
linking.start()
while linking.is_alive():
    turns += 1  # of this thread, which is let go on
    time.sleep(0.001)
def mapped():
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if "libtorch" in line})
before, imported = mapped(), "torch" in sys.modules
import torch
later = [name for name in mapped() if name not in before]
print(json.dumps([before, imported, later, turns, torch.ones(3).sum().item()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at what is mapped")
def test_the_libraries_are_linked_without_the_interpreter_and_found_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True)
    before, imported, later, turns, total = json.loads(done.stdout)
    assert not imported
    assert any("libtorch_cpu" in name for name in before)
    assert all("libtorch_python" in name for name in later)  # which holds Python, and comes with the import
    assert turns > 5
    assert total == 3


def test_without_torch_nothing_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    from aengine.runtime import preload

    monkeypatch.setattr(preload.importlib.util, "find_spec", lambda name: None)
    preload.link_torch()
