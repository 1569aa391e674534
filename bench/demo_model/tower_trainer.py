"""Train the demo model's tower: `python -m bench.demo_model.tower_trainer --out FOLDER`.

The decoder does not change: the tower learns embeddings that make it answer. First the tower learns what stands in each
token of a picture, with two linear heads of its own. Then it learns from the answers of the decoder.

The folder gets the decoder's files, and the tower in them. A step takes about a second on one core of a CPU. On a GPU,
use `--device cuda --processes N`: N processes draw pictures. The state is saved in the folder every few minutes, and
the same command goes on from there. It may have other lengths, batches and rates.

The embedded tower took 1,150 steps of the second part, of 32 to 128 chats each. The last 230 only had pictures of
shapes that are alike. Its answers about digits and shapes of two kinds are wrong: these need a longer training.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.demo_model import network as net
from bench.demo_model import tower as vision
from bench.demo_model.evaluate import MODEL
from bench.demo_model.muon import Muon
from bench.demo_model.pictures import COLOURS
from bench.demo_model.tower_decoder import answer_loss
from bench.demo_model.tower_samples import KINDS, Batch, Job, Pictures, stream
from bench.demo_model.trainer import learning_rate

_WARM_UP = 20  # steps until the learning rate is at its peak
_VECTOR_RATE = 0.125  # the rate of vectors and tables, as a share of that of matrices
_HEADS_WEIGHT = 0.5  # of the heads' loss in the second part
_SAVED = 120.0  # seconds between two saved states


class Heads(nn.Module):
    """Read from each token which thing has its centre there. Only training uses them."""

    def __init__(self, shape: vision.TowerShape) -> None:
        super().__init__()
        self.outputs = len(KINDS) + 1, len(COLOURS)
        layers = 1 + len(shape.deepstack_visual_indexes)
        self.linear = nn.ModuleList(nn.Linear(shape.out_hidden_size, sum(self.outputs)) for _ in range(layers))

    def forward(self, embedded: Tensor, deep: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits of kinds and of colours, [pictures, tokens, ...]."""
        total = torch.stack([linear(one) for linear, one in zip(self.linear, (embedded, *deep))]).sum(0)
        kinds, colours = total.split(self.outputs, dim=-1)
        return kinds, colours


class Training:
    """The tower and its heads, their optimizers, and how many steps of each part are done."""

    def __init__(self, shape: vision.TowerShape, state: Path, rate: float, device: torch.device) -> None:
        self.tower, self.heads = vision.Tower(shape).to(device), Heads(shape).to(device)
        self.device = device
        self._state, self._saved = state, time.monotonic()
        self.done = {"heads": 0, "answers": 0}
        parts = [(name, p) for name, p in self.tower.named_parameters()]
        matrices = [p for name, p in parts if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in parts if p.ndim < 2 or "embed" in name]
        self._optimizers = (
            Muon(matrices, rate),
            torch.optim.AdamW(others, _VECTOR_RATE * rate, (0.9, 0.95), weight_decay=0.0),
            torch.optim.AdamW(self.heads.parameters(), _VECTOR_RATE * rate, (0.9, 0.95), weight_decay=0.0),
        )
        self._groups = [(group, group["lr"]) for one in self._optimizers for group in one.param_groups]
        if state.exists():
            saved = torch.load(state, map_location=device, weights_only=True)
            self.tower.load_state_dict(saved["tower"])
            self.heads.load_state_dict(saved["heads"])
            self.done = saved["done"]
            for optimizer, values in zip(self._optimizers, saved["optimizers"]):
                optimizer.load_state_dict(values)
            print(f"going on after {self.done}", flush=True)

    def run(self, job: Job, steps: int, processes: int, step_of: Callable[[Batch], dict[str, Tensor]]) -> None:
        """Train until `steps` are done. step_of: returns the loss of a batch, and other figures to print."""
        started, first, part = time.monotonic(), self.done[job.part], job.part
        averages: dict[str, Tensor] = {}
        for step, batch in zip(range(first, steps), stream(job, range(first, steps), processes)):
            for group, rate in self._groups:
                group["lr"] = learning_rate(step / steps, step, rate, _WARM_UP)
            found = step_of(batch.to(self.device))
            found["loss"].backward()
            torch.nn.utils.clip_grad_norm_(self.tower.parameters(), 1.0)
            for optimizer in self._optimizers:
                if all(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            for name, value in found.items():
                averages[name] = averages.get(name, value.detach()) * 0.95 + value.detach() * 0.05
            self.done[part] = step + 1
            if step % 10 == 0:
                shown = ", ".join(f"{name} {value.item():.3f}" for name, value in averages.items())
                speed = (step + 1 - first) / (time.monotonic() - started)
                print(f"{part} {step}, {shown}, {speed:.2f} steps/s", flush=True)
            if time.monotonic() - self._saved > _SAVED:
                self.save()
        self.save()

    def save(self) -> None:
        """Write the state, in place of the last one."""
        whole = {
            "tower": self.tower.state_dict(),
            "heads": self.heads.state_dict(),
            "done": self.done,
            "optimizers": [one.state_dict() for one in self._optimizers],
        }
        beside = self._state.with_suffix(".new")
        torch.save(whole, beside)
        beside.replace(self._state)
        self._saved = time.monotonic()


def heads_loss(training: Training, pictures: Pictures, embedded: Tensor, deep: list[Tensor]) -> dict[str, Tensor]:
    """Return the loss of the heads, the share of pictures without a mistake, and that of colours that are right."""
    kinds, colours = training.heads(embedded, deep)
    there = pictures.kinds > 0
    of_kinds = F.cross_entropy(kinds.flatten(0, 1), pictures.kinds.flatten(), reduction="none")
    of_colours = F.cross_entropy(colours[there], pictures.colours[there])
    right = (kinds.argmax(-1) == pictures.kinds).all(1).float().mean()
    right_colours = (colours.argmax(-1)[there] == pictures.colours[there]).float().mean()
    loss = 3 * of_kinds.mean() + 0.5 * of_kinds[there.flatten()].mean() + of_colours
    return {"loss": loss, "right pictures": right, "right colours": right_colours}


def read(training: Training, pictures: Pictures) -> tuple[Tensor, list[Tensor]]:
    """Return the tower's output."""
    return training.tower(vision.inputs_of(pictures.patches), pictures.rows, pictures.columns)  # type: ignore[no-any-return]


def main() -> None:
    """Parse the command line, train and save."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo_model.tower_trainer", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the decoder; default: the embedded one")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files with the tower")
    parser.add_argument("--head-steps", type=int, default=190, help="length of the first part")
    parser.add_argument("--head-pictures", type=int, default=48, help="pictures in a step of the first part")
    parser.add_argument("--steps", type=int, default=900, help="length of the second part")
    parser.add_argument("--pictures", type=int, default=32, help="pictures in a step of the second part")
    parser.add_argument("--chats", type=int, default=1, help="chats about each picture")
    parser.add_argument("--rate", type=float, default=0.04, help="peak learning rate of matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=1, help="processes that draw pictures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    network = net.load(options.model, device).requires_grad_(False)
    training = Training(vision.TowerShape(), options.out / "training.pt", options.rate, device)

    def name_things(batch: Batch) -> dict[str, Tensor]:
        return heads_loss(training, batch.pictures, *read(training, batch.pictures))

    def answer(batch: Batch) -> dict[str, Tensor]:
        embedded, deep = read(training, batch.pictures)
        of_answers, right = answer_loss(network, batch, embedded, deep)
        named = heads_loss(training, batch.pictures, embedded, deep)
        loss = of_answers + _HEADS_WEIGHT * named["loss"]
        return {**named, "loss": loss, "answers": of_answers, "right tokens": right}

    shared = training.tower.shape, str(options.model / "tokenizer.json"), options.seed
    heads = Job("heads", options.head_pictures, 0, *shared)
    training.run(heads, options.head_steps, options.processes, name_things)
    answers = Job("answers", options.pictures, options.chats, *shared)
    training.run(answers, options.steps, options.processes, answer)
    for path in options.model.iterdir():
        shutil.copyfile(path, options.out / path.name)
    vision.save(training.tower, options.out)
    print(f"saved in {options.out}", flush=True)


if __name__ == "__main__":
    main()
