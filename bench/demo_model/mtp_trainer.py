"""Train the demo model's MTP layer: `python -m bench.demo_model.mtp_trainer --out FOLDER`.

The target answers prompts of the corpus, and its states are kept. The layer then learns the target's distribution of
the tokens ahead, while the target does not change. One CPU core is enough.

The folder gets the target's files. `model.safetensors` also has the layer there, and `config.json` its sizes.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from bench.demo_model import mtp as draft
from bench.demo_model import network as net
from bench.demo_model.evaluate import MODEL
from bench.demo_model.mtp_samples import Batch, Sample, make_samples
from bench.demo_model.muon import Muon
from bench.demo_model.tokenizer import Ids
from bench.demo_model.trainer import learning_rate

DEPTH_WEIGHTS = (1.0, 0.8, 0.6)  # of the losses of the drafts of a chain
_WARM_UP = 20  # steps until the learning rate is at its peak
_VECTOR_RATE = 0.125  # the rate of norms, as a share of that of matrices
_MOST_CHAINS = 24  # of a sample in one pass
_DRAWN_TOKENS = 512  # that a batch does not have, but that its drafts are scored against
_SORTED = 1024  # samples that are sorted by length before they become batches


def batches(samples: Sequence[Sample], ids: Ids, chains: int, rng: Random) -> Iterator[Batch]:
    """Yield batches of about `chains` chains without end. Every pass has another order and other chains."""
    anchored = [(sample, anchors) for sample in samples if len(anchors := sample.trained_anchors(ids))]
    while anchored:
        rng.shuffle(anchored)
        for start in range(0, len(anchored), _SORTED):
            groups: list[list[tuple[Sample, Tensor]]] = []
            room = 0
            for sample, anchors in sorted(anchored[start : start + _SORTED], key=lambda pair: len(pair[0].ids)):
                if room <= 0:
                    groups.append([])
                    room = chains
                chosen = sorted(rng.sample(range(len(anchors)), min(_MOST_CHAINS, len(anchors))))
                groups[-1].append((sample, anchors[chosen]))
                room -= len(chosen)
            rng.shuffle(groups)
            for group in groups:
                yield Batch.of([s for s, _ in group], [chosen for _, chosen in group], len(DEPTH_WEIGHTS))


def loss_of(network: net.Network, mtp: draft.MTP, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the drafts with the target's distributions, summed over the depths.

    Only a part of the vocabulary is scored: the tokens that follow in the batch, and some others by chance.
    """
    outputs = mtp(network.embed_tokens(batch.ids), batch.states, batch.anchors, len(DEPTH_WEIGHTS))
    matrix, offsets = _scored_tokens(network, batch)
    loss = torch.zeros(())
    for i, (weight, output) in enumerate(zip(DEPTH_WEIGHTS, outputs)):
        rows, chains = (batch.following > i).nonzero(as_tuple=True)
        if len(rows):
            with torch.no_grad():
                states = batch.states[rows, batch.anchors[rows, chains] + i + 1]
                wanted = (F.linear(states, matrix) + offsets).softmax(-1)
            loss = loss + weight * F.cross_entropy(F.linear(output[rows, chains], matrix) + offsets, wanted)
    return loss


def _scored_tokens(network: net.Network, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return rows of the output matrix, and what is added to their logits so that the rows stand for all tokens."""
    embedding = network.embed_tokens.weight
    following = torch.zeros(len(embedding), dtype=torch.bool)
    for i in range(len(DEPTH_WEIGHTS)):
        following[batch.ids.gather(1, batch.anchors + i + 2)[batch.following > i]] = True
    others = (~following).nonzero()[:, 0]
    drawn = others[torch.randperm(len(others))[:_DRAWN_TOKENS]]
    scored = torch.cat((following.nonzero()[:, 0], drawn))
    offsets = torch.zeros(len(scored))
    if len(drawn):
        offsets[-len(drawn) :] = math.log(len(others) / len(drawn))
    return embedding[scored], offsets


def train(
    network: net.Network,
    mtp: draft.MTP,
    stream: Iterable[Batch],
    steps: int,
    minutes: float | None,
    peak: float,
) -> int:
    """Train the layer for `steps` or until the minutes are over. Return the number of steps."""
    network.requires_grad_(False)
    matrices = [p for p in mtp.parameters() if p.ndim == 2]
    vectors = [p for p in mtp.parameters() if p.ndim < 2]
    optimizers = Muon(matrices, peak), torch.optim.AdamW(vectors, _VECTOR_RATE * peak, (0.9, 0.95), weight_decay=0.0)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    started, shown, average = time.monotonic(), 0.0, 0.0
    step = -1
    for step, batch in enumerate(stream):
        seconds = time.monotonic() - started
        done = step / steps if minutes is None else seconds / (60 * minutes)
        if done >= 1:
            return step
        for group, rate in groups:
            group["lr"] = learning_rate(done, step, rate, _WARM_UP)
        loss = loss_of(network, mtp, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mtp.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average = average * 0.98 + loss.item() * 0.02 if step else loss.item()
        if step % 20 == 0 and seconds - shown > 5:
            shown = seconds
            print(f"step {step}, {done:.0%}, loss {average:.3f}, {seconds:.0f} s", flush=True)
    return step + 1


def main() -> None:
    """Parse the command line, answer prompts, train and save."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo_model.mtp_trainer", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the target; default: the embedded one")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files with the layer")
    parser.add_argument("--samples", type=int, default=16_384, help="prompts that the target answers")
    parser.add_argument("--steps", type=int, default=2000, help="length of the training")
    parser.add_argument("--minutes", type=float, help="length of the training by the clock instead")
    parser.add_argument("--batch-chains", type=int, default=512, help="chains of drafts in one step")
    parser.add_argument("--rate", type=float, default=0.08, help="peak learning rate of matrices")
    parser.add_argument("--intermediate-size", type=int, default=draft.INTERMEDIATE_SIZE, help="of the layer's MLP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    started = time.monotonic()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    network = net.load(options.model, torch.device("cpu"))
    samples: list[Sample] = []
    for sample in make_samples(network, tokenizer, options.seed, options.samples):
        samples.append(sample)
        if len(samples) % 1024 == 0:
            print(f"{len(samples)} of {options.samples} prompts, {time.monotonic() - started:.0f} s", flush=True)

    mtp = draft.MTP(network.shape, options.intermediate_size)
    print(f"{sum(p.numel() for p in mtp.parameters()) / 1e6:.2f} M parameters", flush=True)
    stream = batches(samples, Ids.of(tokenizer), options.batch_chains, Random(options.seed))
    steps = train(network, mtp, stream, options.steps, options.minutes, options.rate)
    if options.out.resolve() != options.model.resolve():
        shutil.copytree(options.model, options.out, dirs_exist_ok=True)
    draft.save(mtp, options.out)
    print(f"{steps} steps, {time.monotonic() - started:.0f} s in all, saved in {options.out}", flush=True)


if __name__ == "__main__":
    main()
