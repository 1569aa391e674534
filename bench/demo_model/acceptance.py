"""How well the MTP layer drafts: `python -m bench.demo_model.acceptance` prints the tokens that each step keeps.

The examination's questions are answered greedily. A step checks the drafts of one chain. It keeps the drafts that are
right up to the first wrong one, and the target's own token after them. The mean is over all steps; the first token of
an answer comes from the prompt and is not counted. The last step of an answer cannot keep more than the answer has.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.demo_model import mtp as draft
from bench.demo_model import network as net
from bench.demo_model.evaluate import MODEL
from bench.demo_model.mtp_samples import Batch, Sample, answer_all
from bench.demo_model.problems import problems
from bench.demo_model.tokenizer import Ids

_ROWS = 32  # answers that are checked at once


@dataclass(slots=True)
class Curve:
    """The steps and tokens of some answers, for 1, 2, 3... drafts in a step."""

    depth: int
    steps: list[int] = field(init=False)
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.steps, self.tokens = [0] * self.depth, [0] * self.depth

    def add(self, right: Sequence[int]) -> None:
        """Add an answer. right: as `steps_of` takes it."""
        for i in range(self.depth):
            kept = steps_of(right, i + 1)
            self.steps[i] += len(kept)
            self.tokens[i] += sum(kept)

    @property
    def means(self) -> list[float]:
        """The mean number of tokens that a step keeps, for 1, 2, 3... drafts."""
        return [tokens / max(1, steps) for tokens, steps in zip(self.tokens, self.steps)]


def steps_of(right: Sequence[int], drafts: int) -> list[int]:
    """Return how many tokens each step of an answer keeps.

    Args:
        right: How many drafts after each token of the answer but the last are right.
        drafts: Drafts in a step.
    """
    kept: list[int] = []
    done = 0
    while done < len(right):
        kept.append(min(min(right[done], drafts) + 1, len(right) - done))
        done += kept[-1]
    return kept


@torch.inference_mode()
def right_drafts(network: net.Network, mtp: draft.MTP, samples: Sequence[Sample], depth: int) -> list[list[int]]:
    """Return for each answer how many drafts after each of its tokens but the last are right, at most `depth`.

    Only the drafts before the first wrong one count, so a chain may read the answer's tokens instead of its drafts.
    """
    counts: list[list[int]] = []
    for start in range(0, len(samples), _ROWS):
        part = samples[start : start + _ROWS]
        batch = Batch.of(part, [sample.answer_anchors() for sample in part], depth)
        right = torch.ones_like(batch.anchors, dtype=torch.bool)
        total = torch.zeros_like(batch.anchors)
        for i, output in enumerate(mtp(network.embed_tokens(batch.ids), batch.states, batch.anchors, depth)):
            drafts = network.logits(output).argmax(-1)
            right &= (batch.following > i) & (drafts == batch.ids.gather(1, batch.anchors + i + 2))
            total += right
        counts += [row[: len(sample.answer_anchors())] for row, sample in zip(total.tolist(), part)]
    return counts


def measure(folder: Path, seeds: Sequence[int], share: float, depth: int) -> dict[str, Curve]:
    """Return the curve of each family of questions, and of all under an empty name."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    network = net.load(folder, torch.device("cpu"))
    mtp = draft.load(folder, network.shape)
    asked = [p for seed in seeds for p in problems(seed, share)]
    prompts = [tokenizer.encode(p.prompt, add_special_tokens=False).ids for p in asked]
    order = sorted(range(len(asked)), key=lambda i: len(prompts[i]))
    samples = list(answer_all(network, [prompts[i] for i in order], Ids.of(tokenizer), temperature=0.0))
    curves: dict[str, Curve] = defaultdict(lambda: Curve(depth))
    for i, right in zip(order, right_drafts(network, mtp, samples, depth)):
        for family in (asked[i].family, ""):
            curves[family].add(right)
    return curves


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo_model.acceptance", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model; default: the embedded one")
    parser.add_argument("--drafts", type=int, default=4, help="the most drafts in a step")
    parser.add_argument("--share", type=float, default=1.0, help="share of the examination to ask")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2024], help="which questions")
    options = parser.parse_args()
    curves = measure(options.model, options.seeds, options.share, options.drafts)
    for family, curve in sorted(curves.items(), key=lambda item: item[0] == ""):
        print(f"{family or 'all':42}", *(f"{mean:6.2f}" for mean in curve.means))


if __name__ == "__main__":
    main()
