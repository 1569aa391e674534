"""How long the engine takes from nothing to its first token, on a checkpoint of Qwen3-8B's or 0.6B's shape.

    python bench/startup.py [--shape 8b] [--folder /dev/shm/NAME] [--keep] [--cold 1] [--warm 2]

Writes random weights (sharded safetensors, bfloat16) and a tokenizer of full size, unless the folder already has them.
Then fresh processes load it one after another: cold ones with empty kernel caches, and warm ones with the caches of the
cold ones. Prints a JSON line for each, and a table. In all of them the files are in memory already and packages are
byte-compiled, as pip leaves them. Packages that were only unpacked are compiled first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

from bench.results import ROOT, Report, Result, origin, source_line

SHARD_BYTES = 4 * 10**9
VOCAB = 151643  # without the special tokens
PROMPT_TOKENS = 16
# The cache folders of everything that compiles kernels.
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
# Imports the modules of a start-up, and prints their folders.
FOLDERS = """
import importlib, json, sys
import aengine
aengine.Engine
try:
    from aengine.attention.flash_backend import import_flash4
    from aengine.runtime.startup import start_cuda
    from aengine.runtime.startup.compiling import rehearsal
    import_flash4()
except ImportError:
    pass
import sympy, torch._subclasses.fake_tensor  # of the processes that compile kernels
names = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
print(json.dumps(sorted({path for name in names for path in getattr(sys.modules.get(name), "__path__", [])})))
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- the checkpoint, made in another process, so that no context stays on the device -----------------------------


def make_checkpoint(folder: Path, shape: str) -> None:
    import torch
    from safetensors.torch import save_file

    from aengine.attention.torch_backend import TorchAttention
    from aengine.kernels.torch_kernels import TorchKernels
    from aengine.model.config import ModelConfig
    from aengine.model.decoder import Decoder
    from aengine.model.groups import entries_of
    from bench.shapes import write_config

    began = time.perf_counter()
    write_config(folder, shape)
    write_tokenizer(folder)
    entries = entries_of(Decoder(ModelConfig.from_folder(folder), TorchKernels(), TorchAttention()).groups)
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, entry in entries.items():
        if (nbytes := 2 * math.prod(entry.shape)) > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= nbytes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)

    def weight(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return (values.normal_(0.0, 0.02, generator=generator) if len(shape) > 1 else values.fill_(1.0)).cpu()

    files = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: weight(entries[name].shape) for name in names}, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(names, file))
        say(f"wrote {file} ({(folder / file).stat().st_size / 1e9:.1f} GB, {time.perf_counter() - began:.1f} s)")
    index = {
        "metadata": {"total_size": sum(2 * math.prod(entry.shape) for entry in entries.values())},
        "weight_map": files,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))  # the last file: all is there


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer as large as the real one, made from random letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng = random.Random(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    beginnings, merges = list(letters), []
    while len(vocab) < VOCAB:
        left, right = rng.choice(beginnings), rng.choice(letters)
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
            if len(left) < 6:
                beginnings.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


# ---- byte code ---------------------------------------------------------------------------------------------------


def byte_compile(scratch: Path) -> tuple[dict[str, str], str]:
    """Byte-compile the packages that a start-up imports, in place or, if that is not writable, under `scratch`.

    Returns the environment for processes that use the code, and a line for the report.
    """
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    look = [sys.executable, "-c", FOLDERS]
    found = subprocess.run(look, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    folders = [folder for folder in json.loads(found.stdout.splitlines()[-1]) if Path(folder).is_dir()]
    where = "beside the packages"
    if not all(os.access(folder, os.W_OK) for folder in folders):
        environment["PYTHONPYCACHEPREFIX"] = where = str(scratch)
    # Packages contain files for other Python versions, so its exit status is ignored.
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", *folders]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    subprocess.run(look, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)  # the standard library too
    return environment, f"{len(folders)} packages byte-compiled, {where}, in {time.monotonic() - began:.0f} s"


# ---- a fresh process ---------------------------------------------------------------------------------------------


async def serve(folder: Path, knobs: dict[str, str]) -> None:
    """Start the engine, request a token twice, and print the times (monotonic seconds) and the log."""
    stamps = {"interpreter": time.monotonic()}
    import aengine

    engine_type = aengine.Engine  # torch comes when it is entered
    stamps["import"] = time.monotonic()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aengine").addHandler(handler)
    logging.getLogger("aengine").setLevel(logging.DEBUG)  # has the seconds before a device is used
    async with engine_type(str(folder), **knobs) as engine:
        stamps["ready"] = time.monotonic()
        host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for number, name in enumerate(("first token", "again")):
            prompt = [number * 100 + place for place in range(PROMPT_TOKENS)]
            await engine.complete(prompt, max_tokens=1, temperature=0, ignore_eos=True)
            stamps[name] = time.monotonic()
    print(json.dumps({"stamps": stamps, "log": logged, "host_peak_gib": round(host_peak / 2**30, 2)}))


def measure(
    folder: Path, caches: Path, kind: str, environment: dict[str, str], options: argparse.Namespace, report: Report
) -> Result:
    environment = environment | {name: str(caches / name.lower()) for name in CACHES}
    command = [sys.executable, "-m", "bench.startup", "--child", "serve", "--folder", str(folder), "--knob"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *options.knob], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    ended = time.monotonic()
    if done.returncode:
        raise SystemExit(f"the {kind} process ended with {done.returncode}")
    told = json.loads(done.stdout.splitlines()[-1])
    phases: dict[str, float] = {}
    before = began
    for name, stamp in [*told.pop("stamps").items(), ("exit", ended)]:
        phases[name] = round(stamp - before, 3)
        if name == "ready":
            # What start-up itself logged, such as "weights 5.7 s, memory 7.1 s, loaded in 12.8 s", and the rest.
            inner = {name: float(seconds) for name, seconds in _logged_seconds(told["log"])}
            phases |= {f"- {name}": seconds for name, seconds in inner.items()}
            told_apart = sum(inner.get(name, 0.0) for name in ("tokenizer", "torch", "contexts", "loaded"))
            phases["- the rest, such as importing kernels"] = round(phases["ready"] - told_apart, 3)
            phases["**all until ready**"] = round(stamp - began, 3)
        if name == "first token":
            phases["**all until the first token**"] = round(stamp - began, 3)
        before = stamp
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    rate = round(size / 1e9 / phases["- weights"], 2) if phases.get("- weights") else None
    return report.tell(
        {"kind": kind, "shape": options.shape},
        {"weights_gb": round(size / 1e9, 2), "weights_gb_per_s": rate, **phases},
        detail=told,
    )


def _logged_seconds(messages: list[str]) -> list[tuple[str, str]]:
    return [found for message in messages for found in re.findall(r"(\w+)(?: in)? (\d+(?:\.\d+)?) s\b", message)]


def table(results: Sequence[Result]) -> str:
    """Seconds of each phase, medians of the runs of a kind."""
    kinds = list(dict.fromkeys(str(result.case["kind"]) for result in results))
    rows = [f"| seconds | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for phase in dict.fromkeys(name for result in results for name in result.figures if "_gb" not in name):
        cells = []
        for kind in kinds:
            seconds = [
                value
                for result in results
                if result.case["kind"] == kind and (value := result.figures.get(phase)) is not None
            ]
            cells.append(f"{statistics.median(seconds):.2f}" if seconds else "-")
        rows.append(f"| {phase} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["8b", "0.6b"], default="8b")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is or goes; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint that was made here")
    parser.add_argument("--cold", type=int, default=1, help="how many cold starts")
    parser.add_argument("--warm", type=int, default=2, help="how many warm starts")
    parser.add_argument("--knob", nargs="*", default=[], help="name=value of an EngineConfig knob")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=["make", "serve"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "make":
        make_checkpoint(options.folder, options.shape)
        return
    if options.child == "serve":
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        asyncio.run(serve(options.folder, dict(pair.split("=", 1) for pair in options.knob)))
        return

    memory = Path("/dev/shm")
    folder = (options.folder or Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))).resolve()
    made_here = not (folder / "model.safetensors.index.json").exists()
    if made_here and folder.exists() and any(folder.iterdir()):
        parser.error(f"--folder: {folder} holds something else; name a new or an empty folder")
    try:
        if made_here:
            folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "bench.startup", "--child", "make", "--folder", str(folder)]
            subprocess.run([*command, "--shape", options.shape], cwd=ROOT, check=True)
        with tempfile.TemporaryDirectory() as scratch:
            environment, line = byte_compile(Path(scratch, "bytecode"))
            say(line)
            caches = [Path(scratch, f"caches-{number}") for number in range(options.cold)]
            for each in caches:
                each.mkdir()
            starts = [("cold", each) for each in caches] + [("warm", caches[-1])] * options.warm
            report = Report("startup", options.out)
            results = [measure(folder, each, kind, environment, options, report) for kind, each in starts]
        print(f"{table(results)}\n\n{line}\n\n{source_line(origin())}")
    finally:
        if made_here and not options.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
