"""The examination with pictures: `python -m bench.demo_model.picture_exam` prints the rate of right answers.

Training never saw the pictures, and never the wordings that are called unseen. The engine answers greedily. A right
answer has no other word.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from PIL import Image

from bench.demo_model.evaluate import MODEL
from bench.demo_model.picture_questions import Question, ask
from bench.demo_model.pictures import DIGITS, Picture, draw

TARGETS = {"one shape": 0.9}
KINDS = ("one shape", "several alike", "shapes of two kinds", "a digit")
_MAX_TOKENS = 40

Asked = tuple[str, Image.Image, Question]  # the kind of picture, the picture, and what is asked


def exam(seed: int, count: int, *, unseen: bool) -> list[Asked]:
    """Return questions about `count` pictures of each kind."""
    rng = Random(f"{seed} exam {unseen}")
    asked: dict[str, list[Asked]] = {kind: [] for kind in KINDS}
    while any(len(pictures) < count for pictures in asked.values()):
        picture = draw(rng)
        pictures = asked[kind := kind_of(picture)]
        if len(pictures) < count and (question := ask(picture, rng, unseen=unseen)) is not None:
            pictures.append((kind, picture.image, question))
    return [one for pictures in asked.values() for one in pictures]


def kind_of(picture: Picture) -> str:
    """Return which of `KINDS` a picture is of."""
    if picture.things[0].kind in DIGITS:
        return KINDS[3]
    if len({(thing.kind, thing.colour) for thing in picture.things}) > 1:
        return KINDS[2]
    return KINDS[0] if len(picture.things) == 1 else KINDS[1]


def by_engine(folder: Path, device: str, asked: Sequence[Asked]) -> list[str]:
    """Return the engine's answers."""
    import aengine

    async def answer_all() -> list[str]:
        async with aengine.Engine(str(folder), device=device, max_queue=len(asked)) as engine:

            async def answer(image: Image.Image, question: Question) -> str:
                content = [{"type": "image", "image": image}, {"type": "text", "text": question.text}]
                completion = await engine.chat([{"role": "user", "content": content}], max_tokens=_MAX_TOKENS)
                return str(completion.text)

            return list(await asyncio.gather(*(answer(image, question) for _, image, question in asked)))

    return asyncio.run(answer_all())


def report(asked: Sequence[Asked], answers: Sequence[str], wordings: str, mistakes: int = 0) -> bool:
    """Print the rate of each kind of picture, and some mistakes. Return whether all targets are reached."""
    passed = True
    for kind in KINDS:
        own = [(question, answer) for (of, _, question), answer in zip(asked, answers) if of == kind]
        wrong = [(question, answer) for question, answer in own if answer != question.answer]
        right = len(own) - len(wrong)
        passed &= right >= TARGETS.get(kind, 0.0) * len(own)
        print(f"{kind + ', ' + wordings:40} {right / len(own):7.1%}  {right:4} of {len(own):4}")
        for question, answer in wrong[:mistakes]:
            print(f"    {question.text!r}\n      wanted {question.answer!r}\n      got    {answer!r}")
    return passed


def main() -> None:
    """Parse the command line and examine; exit status 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo_model.picture_exam", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model; default: the embedded one")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--count", type=int, default=200, help="pictures of each kind")
    parser.add_argument("--seed", type=int, default=9001, help="which pictures and questions")
    parser.add_argument("--mistakes", type=int, default=0, help="mistakes to show for each family")
    options = parser.parse_args()
    passed = True
    for unseen in (False, True):
        asked = exam(options.seed, options.count, unseen=unseen)
        answers = by_engine(options.model, options.device, asked)
        passed &= report(asked, answers, "unseen wordings" if unseen else "trained wordings", options.mistakes)
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
