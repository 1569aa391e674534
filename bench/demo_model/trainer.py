"""Train the demo model: `python -m bench.demo_model.trainer --out FOLDER`.

The embedded weights took 19,907 steps (652 M tokens): 6 minutes on one H200, while 12 cores generated documents. A CPU
is far too slow for it.

Reproducible means: the same seed, steps and tokens give the same documents, tokenizer and order of batches on
every machine. The weights are then the same up to the rounding of the machine's matrix kernels, and the
examination's rates agree within about a point; a bit-identical file is not promised.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.demo_model import network as net
from bench.demo_model.stream import Rows, make_stream
from bench.demo_model.tokenizer import Ids, save_tokenizer, train_tokenizer

_WARM_UP = 200  # steps until the learning rate is at its peak
_PROMPT_WEIGHT = 0.1  # of the tokens of prompts


def batches(shards: Iterable[tuple[Rows, Rows]], tokens: int, device: torch.device) -> Iterator[Tensor]:
    """Batches of about `tokens`, int64 [rows, length + 1], of short and of long rows in turn."""
    for parts in shards:
        yield from chain.from_iterable(zip(*(_slices(rows, tokens, device) for rows in parts)))


def _slices(rows: Rows, tokens: int, device: torch.device) -> Iterator[Tensor]:
    size = max(1, min(tokens // (rows.shape[1] - 1), len(rows)))
    data = torch.from_numpy(rows.astype(np.int32)).to(device)
    for start in range(0, len(rows) - size + 1, size):
        yield data[start : start + size].long()


def weights_of(batch: Tensor, start: int, role: int, end: int) -> Tensor:
    """Return the weight of each target, float32 [rows, length], for a batch of ids [rows, length + 1].

    Answers count fully, the prompts of chats a tenth. `start`, `role` and
    `end` are the ids of `<|im_start|>`, `assistant` and `<|endoftext|>`.
    """
    places = torch.arange(batch.shape[1], device=batch.device).expand_as(batch)
    turn = torch.where(batch == start, places, -1).cummax(1).values  # where the latest turn began
    document = torch.where(batch == end, places, -1).cummax(1).values  # where the latest document ended
    speaker = batch.gather(1, (turn + 1).clamp(0, batch.shape[1] - 1))
    said = (turn <= document) | ((speaker == role) & (places > turn + 2))  # after "<|im_start|>assistant\n"
    return torch.where(said, 1.0, _PROMPT_WEIGHT)[:, 1:]


def optimizer_for(network: net.Network, rate: float) -> torch.optim.AdamW:
    """AdamW; norms do not decay."""
    matrices = [p for p in network.parameters() if p.ndim == 2]
    vectors = [p for p in network.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(network.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def learning_rate(done: float, step: int, peak: float, warm_up: int = _WARM_UP) -> float:
    """Warm up, then a half cosine down to a hundredth. `done` is the share of the training that is over."""
    cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return peak * cosine * min(1.0, (step + 1) / warm_up)


def loss_of(network: net.Network, batch: Tensor, weights: Tensor) -> Tensor:
    """The mean of the targets' cross entropies, weighted as `weights_of` says; on a GPU in bfloat16."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        logits = network(batch[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def train(
    network: net.Network,
    stream: Iterable[Tensor],
    ids: Ids,
    steps: int,
    minutes: float | None,
    peak: float,
    loss_function: Callable[[net.Network, Tensor, Tensor], Tensor] = loss_of,
) -> int:
    """Train for `steps` or until the minutes are over. Returns the number of steps."""
    device = next(network.parameters()).device
    optimizer = optimizer_for(network, peak)
    started, tokens, shown = time.monotonic(), 0, 0.0
    total = torch.zeros((), device=device)
    for step, batch in enumerate(stream):
        seconds = time.monotonic() - started
        done = step / steps if minutes is None else seconds / (60 * minutes)
        if done >= 1:
            return step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, step, peak)
        loss = loss_function(network, batch, weights_of(batch, ids.turn_start, ids.assistant, ids.text_end))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = total * 0.98 + loss.detach() * 0.02 if step else loss.detach()
        tokens += batch[:, 1:].numel()
        if step % 20 == 0 and seconds - shown > 5:
            shown = seconds
            speed = tokens / seconds
            print(f"step {step}, {done:.0%}, loss {total.item():.3f}, {speed / 1e3:.0f}k tokens/s", flush=True)
    return step


def main() -> None:
    """Parse the command line, make the stream, train and save."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo_model.trainer", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--steps", type=int, default=19_907, help="length of the training")
    parser.add_argument("--minutes", type=float, help="length of the training by the clock instead")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens in one step")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-heads", type=int, default=net.Shape().num_key_value_heads)
    parser.add_argument("--no-compile", action="store_true", help="run torch's own kernels one by one on a GPU, too")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes that generate the stream")
    options = parser.parse_args()
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    )
    options.out.mkdir(parents=True, exist_ok=True)

    started = time.monotonic()
    tokenizer = train_tokenizer(options.seed)
    save_tokenizer(tokenizer, options.out)
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens, {time.monotonic() - started:.0f} s", flush=True)

    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    network = net.Network(net.Shape(num_key_value_heads=options.kv_heads)).to(device)
    parameters = sum(p.numel() for p in network.parameters())
    print(f"{parameters / 1e6:.2f} M parameters on {device}", flush=True)
    ids = Ids.of(tokenizer)
    compiled = device.type == "cuda" and not options.no_compile
    loss_function = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    with closing(make_stream(options.out / "tokenizer.json", options.seed, options.processes)) as shards:
        stream = batches(shards, options.batch_tokens, device)
        steps = train(network, stream, ids, options.steps, options.minutes, options.rate, loss_function)
    net.save(network, options.out, turn_end=ids.turn_end, text_end=ids.text_end)
    print(f"{steps} steps, {time.monotonic() - started:.0f} s in all, saved in {options.out}", flush=True)


if __name__ == "__main__":
    main()
