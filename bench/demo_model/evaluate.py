"""The examination: `python -m bench.demo_model.evaluate` prints the rate of right answers for each family.

The engine answers, with the model's own defaults, which are greedy. With `--reference` the trainer's own network
answers instead.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from bench.demo_model.problems import TARGETS, TRAINED_PROMPTS, Problem, problems

MODEL = Path(__file__).parents[2] / "aengine" / "demo" / "model"
Generate = Callable[[Sequence[Problem]], list[str]]


def grade(asked: Sequence[Problem], answers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Right answers and questions of each family, in the order of the examination."""
    rates: dict[str, tuple[int, int]] = {}
    for problem, answer in zip(asked, answers, strict=True):
        right, count = rates.get(problem.family, (0, 0))
        rates[problem.family] = (right + problem.is_right(answer), count + 1)
    return rates


def report(asked: Sequence[Problem], answers: Sequence[str], mistakes: int = 0) -> bool:
    """Print the rates, and some mistakes of each family. True when every target is reached."""
    passed = True
    for family, (right, count) in grade(asked, answers).items():
        target = TARGETS.get(family)
        reached = target is None or right >= target * count
        passed &= reached
        note = f"target {target:.0%}{'' if reached else ', MISSED'}" if target else ""
        kind = "trained" if family in TRAINED_PROMPTS else "held out"
        print(f"{family:42} {right / count:7.1%}  {right:4} of {count:4}  {kind:9} {note}".rstrip())
        wrong = [(p, a) for p, a in zip(asked, answers) if p.family == family and not p.is_right(a)]
        for problem, answer in wrong[:mistakes]:
            print(f"    {problem.question!r}\n      wanted {problem.expected!r}\n      got    {answer!r}")
    return passed


def by_reference(folder: Path, device: str, temperature: float | None = None) -> Generate:
    """Answers of the trainer's network, greedy without a temperature."""
    import torch
    from tokenizers import Tokenizer

    from bench.demo_model import network as net
    from bench.demo_model.tokenizer import Ids

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    network = net.load(folder, torch.device(device))
    ids = Ids.of(tokenizer)
    stops = [ids.turn_end, ids.text_end]
    room = 1 << (14 if device == "cpu" else 16)  # tokens in a batch's prompts

    def generate(asked: Sequence[Problem]) -> list[str]:
        prompts = [tokenizer.encode(p.prompt, add_special_tokens=False).ids for p in asked]
        groups: defaultdict[int, list[int]] = defaultdict(list)  # like lengths decode together
        for i, prompt in enumerate(prompts):
            groups[len(prompt).bit_length()].append(i)
        answers = [""] * len(asked)
        for bits, group in groups.items():
            rows = max(8, room >> bits)
            for start in range(0, len(group), rows):
                part = group[start : start + rows]
                longest = max(asked[i].max_tokens for i in part)
                drawn = network.decode([prompts[i] for i in part], longest, stops, temperature or 0)
                for i, said in zip(part, drawn):
                    answers[i] = tokenizer.decode(said[: asked[i].max_tokens])
        return answers

    return generate


def by_engine(folder: Path, device: str, temperature: float | None = None) -> Generate:
    """Return the engine's answers. Without a temperature the model's own defaults apply."""
    import aengine

    sampling: dict[str, Any] = {} if temperature is None else {"temperature": temperature}

    async def answer_all(asked: Sequence[Problem]) -> list[str]:
        async with aengine.Engine(str(folder), device=device, max_queue=len(asked)) as engine:

            async def answer(problem: Problem) -> str:
                completion = await engine.complete(problem.prompt, max_tokens=problem.max_tokens, **sampling)
                return str(completion.text)

            tasks: list[Awaitable[str]] = [answer(problem) for problem in asked]
            return list(await asyncio.gather(*tasks))

    return lambda asked: asyncio.run(answer_all(asked))


def main() -> None:
    """Parse the command line and examine; exit status 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo_model.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model; default: the embedded one")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--share", type=float, default=1.0, help="share of the examination to ask")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2024], help="which questions; other seeds, fresh ones")
    parser.add_argument("--temperature", type=float, help="default: the model's own")
    parser.add_argument("--only", default="", help="only families whose names have this in them")
    parser.add_argument("--mistakes", type=int, default=0, help="mistakes to show for each family")
    parser.add_argument("--reference", action="store_true", help="let the trainer's network answer, not the engine")
    options = parser.parse_args()
    device = options.device
    if options.reference and device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = [p for seed in options.seeds for p in problems(seed, options.share) if options.only in p.family]
    generate = (by_reference if options.reference else by_engine)(options.model, device, options.temperature)
    if not report(asked, generate(asked), options.mistakes):
        sys.exit(1)


if __name__ == "__main__":
    main()
