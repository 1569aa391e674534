"""The order of a start-up: cheap checks come before steps that take a minute."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aengine.config import EngineConfig
from aengine.config.configure import configure
from aengine.engine import loaded
from aengine.engine.interpreter import SWITCH_SECONDS
from aengine.errors import AengineError, CheckpointError
from aengine.latency import Latencies
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import resolve_model
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import Start

BROKEN_START = """
import sys
from aengine.config import EngineConfig
from aengine.engine import loaded
from aengine.errors import AengineError
from aengine.latency import Latencies
from aengine.text.grammar import grammars

def other_version(*_, **__):
    raise TypeError("of another version")

if sys.argv[1] == "library":
    grammars.LLMatcher = other_version
try:
    loaded.load(EngineConfig(model=sys.argv[2], device="cpu"), Latencies(), None)
except AengineError as error:
    print(error, "torch" if "torch" in sys.modules else "no torch", sep=", ")
"""


class Started(Exception):
    """Fail: weights would be read now."""


def start(config: EngineConfig, folder: Path, model: ModelConfig, begin_text: Callable[[], object]) -> Runtime:
    begin_text()
    raise Started


def load(folder: Path, start: Start = start) -> None:
    loaded.load(configure(EngineConfig, {}, model=str(folder), device="cpu"), Latencies(), start)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copytree(resolve_model(None, None), tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_sound_checkpoint_gets_as_far_as_its_weights(checkpoint: Path) -> None:
    with pytest.raises(Started):
        load(checkpoint)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{}"),
        ("tokenizer.json", "no JSON"),
        ("tokenizer.json", "{}"),
        ("generation_config.json", '{"eos_token_id": -1}'),
    ],
)
def test_files_are_read_before_weights(file: str, text: str, checkpoint: Path) -> None:
    (checkpoint / file).write_text(text)
    with pytest.raises(CheckpointError, match=file):
        load(checkpoint)


def test_a_vocabulary_that_the_grammar_library_refuses_ends_the_start(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    runtime: Any = SimpleNamespace(
        adapters=None, copies=None, pool=SimpleNamespace(max_model_len=1), model=SimpleNamespace(near_positions=0),
        close=lambda: closed.append("runtime"),
    )  # fmt: skip

    def broken(*_: object) -> None:
        raise AengineError("the library does not take this vocabulary")

    def begin(*arguments: Any) -> Runtime:
        arguments[-1]()
        return cast(Runtime, runtime)

    monkeypatch.setattr(loaded, "Grammars", broken)
    with pytest.raises(AengineError, match="vocabulary"):
        load(checkpoint, begin)
    assert closed == ["runtime"]


def test_a_vocabulary_with_impossible_ids_ends_the_start(checkpoint: Path) -> None:
    path, closed = checkpoint / "tokenizer.json", []
    data = json.loads(path.read_text())
    data["model"]["vocab"]["far"] = 2**31
    path.write_text(json.dumps(data))
    runtime: Any = SimpleNamespace(
        adapters=None, copies=None, pool=SimpleNamespace(max_model_len=1), close=lambda: closed.append("runtime")
    )

    def begin(*arguments: Any) -> Runtime:
        arguments[-1]()
        return cast(Runtime, runtime)

    with pytest.raises(CheckpointError, match=r"tokenizer\.json has token ids up to 2147483648"):
        load(checkpoint, begin)
    assert closed == ["runtime"]


@pytest.mark.parametrize("broken", ["tokenizer", "library"])
def test_an_unusable_tokenizer_or_library_is_reported_before_torch_is_imported(broken: str, checkpoint: Path) -> None:
    if broken == "tokenizer":
        (checkpoint / "tokenizer.json").write_text("no JSON")
    done = subprocess.run([sys.executable, "-c", BROKEN_START, broken, checkpoint], capture_output=True, text=True)
    reason = {
        "tokenizer": f"{checkpoint}/tokenizer.json is not a tokenizer: expected ident at line 1 column 2",
        "library": "the grammar library, llguidance, does not work here: of another version",
    }[broken]
    assert done.stdout == f"{reason}, no torch\n"


def test_a_missing_library_gives_a_clear_error() -> None:
    code = "import sys; sys.modules['llguidance'] = None\nimport aengine\n"
    code += "try:\n    aengine.Engine\nexcept aengine.AengineError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("the grammar library, llguidance, does not work here: import of llguidance halted")


def test_the_devices_are_opened_while_text_is_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, read = threading.Event(), loaded._load_tokenizer
    named: list[tuple[str, int]] = []

    def open_contexts(name: str, count: int) -> None:
        named.append((name, count))
        opened.set()

    def load_tokenizer(*args: Any) -> Any:
        assert opened.wait(10)
        return read(*args)

    monkeypatch.setattr(loaded, "open_contexts", open_contexts)
    monkeypatch.setattr(loaded, "_load_tokenizer", load_tokenizer)
    config = configure(EngineConfig, {}, model=str(checkpoint), device="cpu", tensor_parallel_size=2)
    with pytest.raises(Started):
        loaded.load(config, Latencies(), start)
    assert named == [("cpu", 2)]


def test_the_tokenizers_library_is_used_before_another_thread_links_torch(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(loaded, "warm_up_library", lambda: events.append("used"))
    monkeypatch.setattr(loaded, "link_torch", lambda: events.append("links"))
    with pytest.raises(Started):
        load(checkpoint)
    assert events == ["used", "links"]


def test_its_threads_end_where_the_weights_cannot_be_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(loaded.Grammars, "close", lambda grammars: closed.append(grammars))
    with pytest.raises(Started):
        load(checkpoint)
    assert len(closed) == 1


def test_grammars_are_made_while_weights_are_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, making = threading.Event(), threading.Event()
    real = loaded.Grammars

    def grammars(*args: Any) -> Any:
        making.set()
        assert reading.wait(5), "no weights are read meanwhile"
        return real(*args)

    def begin(config: EngineConfig, folder: Path, model: ModelConfig, begin_text: Callable[[], object]) -> Runtime:
        assert not making.is_set(), "grammars were made before, beside imports that hold the GIL, too"
        begin_text()
        assert making.wait(5)
        reading.set()
        raise Started

    monkeypatch.setattr(loaded, "Grammars", grammars)
    with pytest.raises(Started):
        load(checkpoint, begin)


def test_its_threads_end_where_the_device_cannot_be_opened(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(*_: object) -> Runtime:
        raise Started

    made = []
    monkeypatch.setattr(loaded, "Grammars", lambda *_: made.append(1))
    threads = set(threading.enumerate())
    with pytest.raises(Started):
        load(checkpoint, no_device)
    assert not made
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("step", ["_read_adapters", "Loaded"])
def test_the_device_is_let_go_where_what_comes_after_it_fails(
    step: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    adapters, copies = (SimpleNamespace(close=partial(closed.append, name)) for name in ("adapters", "copies"))
    pool = SimpleNamespace(max_model_len=1)
    model = SimpleNamespace(tower=None, no_images="")
    runtime: Any = SimpleNamespace(
        adapters=adapters, copies=copies, pool=pool, model=model, close=lambda: closed.append("runtime")
    )

    def fail(*_: object) -> None:
        raise Started

    def begin(*arguments: Any) -> Runtime:
        arguments[-1]()
        return cast(Runtime, runtime)

    monkeypatch.setattr(loaded.Grammars, "close", lambda _: closed.append("grammars"))
    monkeypatch.setattr(loaded, "_read_adapters", lambda *_: None)
    monkeypatch.setattr(loaded, step, fail)
    with pytest.raises(Started):
        load(checkpoint, begin)
    assert closed == ["adapters", "copies", "runtime", "grammars"]


def test_the_interpreter_is_as_before_afterwards(checkpoint: Path) -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    meanwhile = []

    def begin(*_: object) -> Runtime:
        meanwhile.append((gc.isenabled(), sys.getswitchinterval()))
        raise Started

    try:
        with pytest.raises(Started):
            load(checkpoint, begin)
        assert sys.getswitchinterval() == pytest.approx(0.004)
    finally:
        sys.setswitchinterval(usual)
    assert meanwhile == [(False, pytest.approx(SWITCH_SECONDS))]
    assert gc.isenabled()


def test_config_json_is_parsed_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    real = ModelConfig.from_folder
    monkeypatch.setattr(ModelConfig, "from_folder", lambda folder: read.append(folder) or real(folder))
    with pytest.raises(Started):
        load(checkpoint)
    assert read == [checkpoint]
