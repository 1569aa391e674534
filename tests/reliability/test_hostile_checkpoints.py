"""Checkpoints made to do harm: each ends in one clear error, in bounded time and memory, whatever sizes it claims."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import aengine
from aengine.errors import CheckpointError, InvalidRequestError
from aengine.model.loading.hub import DEMO
from tests.cli.running import AENGINE, environment
from tests.one_in import one_in

pytestmark = pytest.mark.anyio

SECONDS = 20.0  # a refusal takes far less; the machine may be busy
MEMORY = 400 * 2**20  # bytes on top of what the process had; the largest file below, parsed
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

Damage = Callable[[Path], None]


def rewrite(name: str, **changes: object) -> Damage:
    """Keys of a JSON file replaced; `...` takes one away."""

    def damage(folder: Path) -> None:
        path = folder / name
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return damage


def replace(name: str, content: bytes | Callable[[], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content())

    return damage


def config(**changes: object) -> Damage:
    """Keys of config.json replaced, where they are in it; `...` takes one away."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        text = values["text_config"]
        for key, value in changes.items():
            place = next((one for one in (values, text["rope_parameters"], text) if key in one), values)
            place[key] = value
            if value is ...:
                del place[key]
        path.write_text(json.dumps(values))

    return damage


def edit_header(change: Callable[[dict[str, dict[str, object]]], object]) -> Damage:
    """The weights with another header, the data as it was."""

    def damage(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        replace(WEIGHTS, struct.pack("<Q", len(text)) + text + content[8 + length :])(folder)

    return damage


def header_of(text: bytes | Callable[[], bytes], claimed: int | None = None) -> Damage:
    def damage(folder: Path) -> None:
        made = text if isinstance(text, bytes) else text()
        replace(WEIGHTS, struct.pack("<Q", len(made) if claimed is None else claimed) + made)(folder)

    return damage


def index_of(name: object) -> Damage:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))

    return damage


def truncate(name: str, size: int) -> Damage:
    return lambda folder: replace(name, (folder / name).read_bytes()[:size])(folder)


def link(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def pipe(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> object:
        return os.mkdir, ("unpickled",)


def only_pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def sparse(name: str, size: int) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return damage


def many_names() -> bytes:
    """Names that all differ but for the last: looked for in pairs, they would take hours."""
    names = ",".join(f'"{number}":0' for number in range(500_000))
    return f'{{{names},"499999":0}}'.encode()


def added_tokens(count: int) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text())
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        first = 100_000
        values["added_tokens"] += [{"id": first + i, "content": f"<bomb{i}>", **flags} for i in range(count)]
        path.write_text(json.dumps(values))

    return damage


def bpe(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text())
        values["model"].update(changes)
        path.write_text(json.dumps(values))

    return damage


def header_of_zeros(folder: Path) -> None:
    header_of(b"", 90_000_000)(folder)
    os.truncate(folder / WEIGHTS, 10**9)  # sparse


def split_at(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def adding(ids: int) -> dict[str, object]:
    token = {"id": "x", "ids": [1] * ids, "tokens": ["x"] * ids}
    form = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": form, "pair": form, "special_tokens": {"x": token}}


def growing(times: int, steps: int, name: str = "normalizers") -> dict[str, object]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}
    return {"type": "Sequence", name: [step] * steps}


def no_vocabulary(folder: Path) -> None:
    bpe(vocab={}, merges=[])(folder)
    rewrite("tokenizer.json", added_tokens=[], post_processor=None)(folder)


def token(header: dict[str, dict[str, object]]) -> dict[str, object]:
    return next(header[name] for name in header if name.endswith("embed_tokens.weight"))


def moved(by: int) -> Damage:
    def change(header: dict[str, dict[str, object]]) -> None:
        last = max(header, key=lambda name: header[name].get("data_offsets", [0])[0])  # type: ignore[index]
        start, end = header[last]["data_offsets"]  # type: ignore[misc]
        header[last]["data_offsets"] = [start + by, end + by]

    return edit_header(change)


CONFIGS: dict[str, tuple[Damage, str]] = {
    "no heads": (config(num_attention_heads=0), "num_attention_heads"),
    "a negative width": (config(hidden_size=-64), "hidden_size"),
    "10^12 layers": (config(num_hidden_layers=10**12), "num_hidden_layers"),
    "4,096 layers that are not there": (config(num_hidden_layers=4096), "lack"),
    "a wide model that is not there": (config(hidden_size=2**20, intermediate_size=2**20), "shape"),
    "a vocabulary of 10^30": (config(vocab_size=10**30), "vocab_size"),
    "a vocabulary that is not there": (config(vocab_size=2**19), "shape"),
    "10^18 positions": (config(max_position_embeddings=10**18), "max_position_embeddings"),
    "a size as text": (config(hidden_size="64"), "hidden_size"),
    "a size as a fraction": (config(hidden_size=64.5), "hidden_size"),
    "a size as a truth": (config(num_key_value_heads=True), "num_key_value_heads"),
    "a size as a list": (config(intermediate_size=[1]), "intermediate_size"),
    "NaN": (config(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "infinity": (config(rope_theta=float("inf")), "rope_theta"),
    "1e999": (replace("config.json", b'{"architectures":["Qwen3ForCausalLM"],"rms_norm_eps":1e999}'), "is missing"),
    "no width": (config(hidden_size=...), "hidden_size"),
    "no architecture": (config(architectures=...), "architecture"),
    "an endless architecture": (config(architectures=["x" * 1_000_000]), "architecture"),
    "an endless activation": (config(hidden_act="x" * 1_000_000), "hidden_act"),
    "remote code": (config(architectures=["Evil"], auto_map={"AutoModel": "evil.Evil"}), "architecture"),
    "nested": (replace("config.json", b'{"a":' * 100_000), "JSON"),
    "100 MB": (sparse("config.json", 100_000_000), "larger"),
    "a million lists": (replace("config.json", lambda: b'{"a":[' + b"[]," * 1_000_000 + b"[]]}"), "architectures"),
    "a device": (link("config.json", "/dev/zero"), "regular"),
    "a pipe": (pipe("config.json"), "regular"),
    "a folder": (lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir())[0], "regular"),
}
WEIGHT_FILES: dict[str, tuple[Damage, str]] = {
    "overlapping": (moved(-4), "starts at byte"),
    "out of range": (moved(2**40), "starts at byte"),
    "negative": (moved(-(2**40)), "data_offsets"),
    "another dtype": (edit_header(lambda header: token(header).update(dtype="I32")), "embed_tokens"),
    "an unknown dtype": (edit_header(lambda header: token(header).update(dtype="F" * 10**6)), "dtype"),
    "another shape": (edit_header(lambda header: token(header).update(shape=[1, 10**12])), "embed_tokens"),
    "a shape that overflows": (edit_header(lambda header: token(header).update(shape=[2**62, 2**62])), "embed_tokens"),
    "a shape without end": (edit_header(lambda header: token(header).update(shape=[1] * 10**6)), "shape"),
    "an endless name": (edit_header(lambda header: header.update({"x" * 10**6: {}})), "dtype"),
    "a lying header length": (header_of(b"{}", claimed=2**63), "header of"),
    "a header of 90 MB that is not there": (header_of(b"{}", claimed=90_000_000), "header of"),
    "a header of zeros": (header_of_zeros, "JSON"),
    "a name twice": (header_of(b'{"a":{},"a":{}}'), "twice"),
    "a name twice after half a million": (header_of(many_names), "twice"),
    "nested": (header_of(b'{"a":' + b"[" * 100_000), "JSON"),
    "truncated in the data": (truncate(WEIGHTS, 1_000_000), "truncated"),
    "truncated in the header": (truncate(WEIGHTS, 100), "header of"),
    "truncated in the length": (truncate(WEIGHTS, 5), "header of"),
    "empty": (truncate(WEIGHTS, 0), "header of"),
    "a device": (link(WEIGHTS, "/dev/zero"), "no such file"),
    "a pipe": (pipe(WEIGHTS), "no such file"),
    "an index to the parent": (index_of("../../etc/passwd"), "plain file name"),
    "an index to the root": (index_of("/etc/passwd"), "plain file name"),
    "an index with a null byte": (index_of("a\0.safetensors"), "plain file name"),
    "an index to a pickle": (index_of("pytorch_model.bin"), "plain file name"),
    "an index to no text": (index_of(5), "plain file name"),
    "only a pickle": (only_pickled, "pickle"),
}  # fmt: skip
TOKENIZERS: dict[str, tuple[Damage, str]] = {
    "no JSON": (replace("tokenizer.json", b"\x80\x04."), "tokenizer.json"),
    "nested": (replace("tokenizer.json", b'{"a":' * 100_000), "tokenizer.json"),
    "another model": (bpe(type="Evil"), "tokenizer.json"),
    "no vocabulary": (no_vocabulary, "token ids up to"),
    "ids beyond the model's": (bpe(vocab={"a": 0, "b": 2**31}, merges=[]), "tokenizer.json"),
    "negative ids": (bpe(vocab={"a": -1}, merges=[]), "tokenizer.json"),
    "merges of what is not there": (bpe(merges=[["x" * 10_000, "y"]]), "tokenizer.json"),
    "100,000 added tokens": (added_tokens(100_000), "added tokens; the limit is"),
    "a pattern that is none": (rewrite("tokenizer.json", pre_tokenizer=split_at("(" * 9)), "tokenizer.json"),
    "a post-processor of 500,000 ids": (rewrite("tokenizer.json", post_processor=adding(500_000)), "post_processor"),
    "a text of 10 characters for each": (rewrite("tokenizer.json", normalizer=growing(10, 9)), "normalizer"),
    "a step that doubles, 40 times": (rewrite("tokenizer.json", normalizer=growing(2, 40)), "normalizer"),
    "a decoder that multiplies": (rewrite("tokenizer.json", decoder=growing(10**6, 1, "decoders")), "decoder"),
    "100 MB": (sparse("tokenizer.json", 100_000_000), "larger"),
    "a device": (link("tokenizer.json", "/dev/zero"), "regular"),
    "a pipe": (pipe("tokenizer.json"), "regular"),
    "a config that is a list": (replace("tokenizer_config.json", b"[]"), "tokenizer_config.json"),
    "a token that is a number": (rewrite("tokenizer_config.json", eos_token=5), "eos_token"),
    "a template that is a number": (rewrite("tokenizer_config.json", chat_template=5), "chat_template"),
    "added tokens that are a list": (rewrite("tokenizer_config.json", added_tokens_decoder=[1]), "added_tokens"),
    "a config of 100 MB": (sparse("tokenizer_config.json", 100_000_000), "larger"),
    "generation: a text": (rewrite("generation_config.json", do_sample=True, temperature="hot"), "temperature"),
    "generation: NaN": (rewrite("generation_config.json", do_sample=True, top_p=float("nan")), "top_p"),
    "generation: a list": (replace("generation_config.json", b"[1]"), "generation_config.json"),
    "generation: ids beyond the model's": (rewrite("generation_config.json", eos_token_id=[10**9]), "eos_token_id"),
    "generation: out of range": (rewrite("generation_config.json", repetition_penalty=0), "repetition_penalty"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    shutil.copytree(DEMO, made, ignore=shutil.ignore_patterns(WEIGHTS))
    (made / WEIGHTS).symlink_to(DEMO / WEIGHTS)
    return made


def engine_of(folder: Path) -> aengine.Engine:
    return aengine.Engine(model=str(folder), device="cpu", kv_cache_gib=0.2, max_num_seqs=8, progress=False)


def peak_memory() -> int:
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(found.split()[1]) * 1024


def forget_peak() -> int:
    """Reset the peak memory to the memory in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


async def refused(folder: Path, words: str) -> None:
    before, begun = forget_peak(), time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        async with engine_of(folder):
            pass
    message = str(caught.value)
    assert words in message
    assert str(folder) in message
    assert len(message) < 1000 + len(str(folder))
    assert time.monotonic() - begun < SECONDS
    assert peak_memory() - before < MEMORY


@pytest.mark.parametrize("name", one_in(2, CONFIGS))
async def test_configs(folder: Path, name: str) -> None:
    damage, words = CONFIGS[name]
    damage(folder)
    await refused(folder, words)


@pytest.mark.parametrize("name", one_in(3, WEIGHT_FILES))
async def test_weights(folder: Path, name: str) -> None:
    damage, words = WEIGHT_FILES[name]
    damage(folder)
    await refused(folder, words)


@pytest.mark.parametrize("name", one_in(2, TOKENIZERS))
async def test_tokenizers(folder: Path, name: str) -> None:
    damage, words = TOKENIZERS[name]
    damage(folder)
    await refused(folder, words)


async def test_the_sound_one_loads(folder: Path) -> None:
    async with engine_of(folder) as engine:
        assert (await engine.complete("One two three", max_tokens=2, temperature=0)).usage.completion_tokens == 2


async def test_a_catastrophic_pattern_costs_its_own_requests_alone(folder: Path) -> None:
    split = split_at("(a+)+$")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    rewrite("tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})(folder)
    async with engine_of(folder) as engine:
        begun = time.monotonic()
        with pytest.raises(InvalidRequestError, match="the tokenizer cannot read this text"):
            await engine.complete("a" * 2000 + "!", max_tokens=2)
        assert time.monotonic() - begun < SECONDS
        assert (await engine.complete("One two", max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2
        engine.check_integrity()


SERVED = {
    **{f"config: {name}": CONFIGS[name] for name in ("10^12 layers",)},
    **{f"weights: {name}": WEIGHT_FILES[name] for name in ("only a pickle",)},
    **{f"tokenizer: {name}": TOKENIZERS[name] for name in ("generation: a text",)},
}


@pytest.mark.slow
def test_the_command_line_says_it_in_one_sentence(tmp_path: Path) -> None:
    """`aengine serve` on each: exit status 1 and one line, no traceback. Two at a time."""
    waiting = list(SERVED.items())
    while waiting:
        started = []
        for name, (damage, words) in [waiting.pop() for _ in range(min(2, len(waiting)))]:
            folder = tmp_path / name.replace(":", "").replace(" ", "-")
            shutil.copytree(DEMO, folder)
            damage(folder)
            command = [*AENGINE, "serve", "--port", "0", "--model", str(folder)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
            started.append((name, words, process, folder))
        for name, words, process, folder in started:
            try:
                told = process.communicate(timeout=30)[0].decode()
            finally:
                process.kill()
            assert process.returncode == 1, (name, told)
            starting, *_, line = told.splitlines()
            assert starting.startswith("aengine: starting"), (name, told)
            assert line.startswith("aengine: the engine could not be started: "), (name, told)
            assert words in line, (name, told)
            assert not list(folder.parent.glob("**/unpickled")), name
