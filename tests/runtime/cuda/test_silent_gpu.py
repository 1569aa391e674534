"""A GPU that stops answering: every stream ends with an error within seconds, and the server leaves with status 1."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from aengine.model.loading.hub import DEMO
from tests.model.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

TRIGGER = 3900
WITHIN = 5.0  # seconds
# The second GPU computes nothing for 15 s or more, once a prompt ends with the trigger.
PROGRAM = f"""
import sys, torch
from aengine.cli import main
from aengine.runtime.cuda.runner import CudaRunner

launch = CudaRunner.launch

def launch_behind_silence(self, plan):
    if any(new.tokens[-1] == {TRIGGER} for new in plan.new_rows):
        with torch.cuda.stream(self._streams[1]):
            torch.cuda._sleep(30_000_000_000)
        print("silence", flush=True)
    return launch(self, plan)

CudaRunner.launch = launch_behind_silence
sys.exit(main(["serve", *sys.argv[1:]]))
"""


def stream(url: str, prompt: list[int], lines: list[str], begun: threading.Event) -> None:
    """Read a stream to its end."""
    parts = urlsplit(url)
    body = {"input_ids": prompt, "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as connection:
        connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        with connection.getresponse() as answer:
            for line in answer:
                if line.strip():
                    lines.append(line.decode())
                    begun.set()
    begun.set()


def test_streams_end_and_the_server_leaves(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path, vocab_size=4096, hidden_size=256, max_position_embeddings=2048)
    (tmp_path / "tokenizer.json").symlink_to(Path(DEMO) / "tokenizer.json")
    knobs = ("--tensor-parallel-size", "2", "--device", "cuda", "--kv-cache-gib", "0.5", "--max-num-seqs", "8")
    command = [sys.executable, "-c", PROGRAM, "--model", str(tmp_path), "--port", "0", *knobs]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert running.stdout is not None
        heard = []
        for line in running.stdout:
            heard.append(line)
            if found := re.search(r"Serving on (\S+)", line):
                break
        else:
            raise AssertionError("".join(heard))
        answers: list[list[str]] = [[] for _ in range(4)]
        begun = [threading.Event() for _ in answers]
        readers = [
            threading.Thread(target=stream, args=(found[1], [7 + number], answers[number], begun[number]))
            for number in range(3)
        ]
        for reader in readers:
            reader.start()
        for one in begun[:3]:
            assert one.wait(30)
        readers.append(threading.Thread(target=stream, args=(found[1], [5, TRIGGER], answers[3], begun[3])))
        readers[-1].start()
        for line in running.stdout:
            heard.append(line)
            if "silence" in line:
                break
        silent = time.monotonic()
        for reader in readers:
            reader.join(40)
        took = time.monotonic() - silent
        heard += running.communicate(timeout=40)[0].splitlines(keepends=True)
    finally:
        running.kill()
    log = "".join(heard)
    assert [any("engine_failed" in line for line in lines[-2:]) for lines in answers] == [True] * 4, (answers, log)
    assert took < WITHIN, log
    assert "waited in vain" in log
    assert running.returncode == 1, log
