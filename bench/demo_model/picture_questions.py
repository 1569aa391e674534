"""Questions about pictures, and their answers.

Every question has some wordings that training never shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench.demo_model.pictures import DIGITS, SHAPES, Picture

_NUMBERS = ("no", "one", "two", "three", "four")


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a picture. family: what it asks for."""

    family: str
    text: str
    answer: str


Wordings = tuple[tuple[str, ...], tuple[str, ...]]  # those of training, and those that it never shows

_WHAT: Wordings = (
    (
        "What is in this picture?",
        "What is in this picture?",
        "What is in this image?",
        "What is in the picture?",
        "What is in the image?",
        "What's in this image?",
        "What's in this picture?",
        "What do you see?",
        "What do you see in this picture?",
        "What can you see in the image?",
        "What does this picture show?",
        "What does the image show?",
        "What is shown in this picture?",
        "What is this?",
        "Describe this picture.",
        "Describe the image.",
        "Describe this image.",
        "Tell me what you see.",
        "What is on this picture?",
        "Please describe the picture.",
        "Can you describe this image?",
        "What is it?",
        "Which things are in this picture?",
        "",
    ),
    ("What can you see in this picture?", "Please tell me what is in this image.", "What is shown in the image?"),
)
_COLOUR: Wordings = (
    (
        "What colour {is} the {noun}?",
        "What color {is} the {noun}?",
        "Which colour {is} the {noun}?",
        "Which color does the {noun} have?",
        "What is the colour of the {noun}?",
        "What is the color of the {noun}?",
        "Tell me the color of the {noun}.",
        "The {noun}: which colour?",
    ),
    ("Which color {is} the {noun}?", "What colour does the {noun} have?", "Tell me the colour of the {noun}."),
)
_COUNT: Wordings = (
    (
        "How many {noun} are there?",
        "How many {noun} are in this picture?",
        "How many {noun} are in the image?",
        "How many {noun} do you see?",
        "How many {noun} can you see?",
        "Count the {noun}.",
        "What is the number of {noun}?",
        "How many {noun}?",
    ),
    ("How many {noun} are in the picture?", "How many {noun} does the image show?", "Please count the {noun}."),
)
_DIGIT: Wordings = (
    (
        "Which digit is shown?",
        "What digit is shown?",
        "Which digit is this?",
        "What digit is this?",
        "Which digit do you see?",
        "Which digit is in this picture?",
        "What digit is in the image?",
        "Which number is shown?",
        "What number is this?",
        "What number is in this picture?",
        "Read the digit.",
    ),
    ("What number is shown?", "Which digit is in the image?", "Which number do you see?"),
)


def ask(picture: Picture, rng: Random, *, unseen: bool = False, family: str | None = None) -> Question | None:
    """Ask something about a picture. Returns None if the picture has nothing to ask of the family.

    All questions about a picture have the same answer. It names everything that they ask for.
    """
    makers = {name: maker for name, maker in _MAKERS.items() if family in (None, name)}
    found = [(name, words) for name, maker in makers.items() if (words := maker(picture, rng)) is not None]
    if not found:
        return None
    weights = [3 if name == "what" else 1 for name, _ in found]
    name, words = rng.choices(found, weights)[0]
    text = rng.choice(_WORDINGS[name][1 if unseen else 0]).format(**words)
    if not unseen and rng.random() < 0.1:
        text = text.lower() if rng.random() < 0.5 else text.rstrip("?.")
    return Question(name, text, describe(picture))


def describe(picture: Picture) -> str:
    """Return what a picture shows: "A red circle and two blue squares."."""
    parts = []
    for kind, colour, count in _groups(picture):
        article = "an" if colour == "orange" else "a"
        parts.append(f"{article} {colour} {kind}" if count == 1 else f"{_NUMBERS[count]} {colour} {kind}s")
    text = " and ".join(parts) + "."
    return text[0].upper() + text[1:]


def _groups(picture: Picture) -> list[tuple[str, str, int]]:
    """Return kind, colour and number of each group. Their order is that of the lists of kinds and colours."""
    counts = Counter((thing.kind, thing.colour) for thing in picture.things)
    order = (*SHAPES, *DIGITS)
    return sorted(((*group, count) for group, count in counts.items()), key=lambda g: (order.index(g[0]), g[1]))


_Words = dict[str, str] | None  # of a wording; None: there is nothing to ask


def _what(picture: Picture, rng: Random) -> _Words:
    return {}


def _colour(picture: Picture, rng: Random) -> _Words:
    kind, _, count = rng.choice(_groups(picture))
    noun = rng.choice(("digit", "number")) if kind in DIGITS else kind if count == 1 else f"{kind}s"
    return {"noun": noun, "is": "is" if count == 1 else "are"}


def _count(picture: Picture, rng: Random) -> _Words:
    kind, colour, _ = rng.choice(_groups(picture))
    if kind in DIGITS:
        return None
    return {"noun": rng.choice(("shapes", f"{kind}s", f"{kind}s", f"{colour} {kind}s"))}


def _digit(picture: Picture, rng: Random) -> _Words:
    return {} if picture.things[0].kind in DIGITS else None


_MAKERS: dict[str, Callable[[Picture, Random], _Words]] = {
    "what": _what,
    "colour": _colour,
    "count": _count,
    "digit": _digit,
}
FAMILIES = tuple(_MAKERS)
_WORDINGS = {"what": _WHAT, "colour": _COLOUR, "count": _COUNT, "digit": _DIGIT}
