"""torch's libraries are linked before torch is imported, and the import finds them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aengine.model.loading.hub import resolve_model

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

# Parses a tokenizer while another thread links a library, whose constructor takes half a second.
PARSING = """
import ctypes, os, sys, threading, time
from aengine.text.tokens.tokenizer import Backend, warm_up_library
events = []
def link():
    dlopen = ctypes.CDLL(None).dlopen
    events.append("links")
    dlopen(os.fsencode(sys.argv[1]), os.RTLD_NOW)
    events.append("linked")
with open(sys.argv[2]) as file:
    text = file.read()
warm_up_library()
linking = threading.Thread(target=link)
linking.start()
while not events:
    time.sleep(0.001)
time.sleep(0.05)
Backend.from_str(text).encode_batch_fast(["a text"])
events.append("parsed")
linking.join()
print(*events)
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


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="compiles a library")
def test_a_tokenizer_is_parsed_while_libraries_are_linked(tmp_path: Path) -> None:
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text("#include <unistd.h>\n__attribute__((constructor)) static void begin(void) { usleep(500000); }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    tokenizer = resolve_model(None, None) / "tokenizer.json"
    done = subprocess.run([sys.executable, "-c", PARSING, library, tokenizer], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == [b"links", b"parsed", b"linked"]


def test_without_torch_nothing_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    from aengine.runtime import preload

    monkeypatch.setattr(preload.importlib.util, "find_spec", lambda name: None)
    preload.link_torch()
