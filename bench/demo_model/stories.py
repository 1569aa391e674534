"""Short stories from interchangeable parts, for longer answers."""

from __future__ import annotations

from random import Random

from bench.demo_model.pools import TRAINED

_ANIMALS = (
    "cat",
    "dog",
    "fox",
    "bear",
    "rabbit",
    "mouse",
    "horse",
    "frog",
    "penguin",
    "lion",
    "duck",
    "robot",
    "dragon",
)
_KINDS = ("a little", "a young", "an old", "a brave", "a clever", "a shy", "a happy", "a curious")
_PLACES = (
    "in a small village",
    "near the sea",
    "in a deep forest",
    "on a high mountain",
    "by a long river",
    "in a big city",
)
_WISHES = (
    ("wanted to see the stars", "climbed the highest hill", "There were more stars than anyone could count"),
    ("wanted to find a friend", "walked to the next village", "There a kind child was waiting with a smile"),
    ("was looking for a lost key", "searched the whole garden", "The key lay under an old apple tree"),
    ("wanted to learn to swim", "went to the water every morning", "After a week it was easy"),
    ("dreamed of a great journey", "packed a bag and left", "The road was long, and every day brought something new"),
    (
        "wanted to bake a cake",
        "asked everyone for flour, sugar and butter",
        "The cake was sweet, and all of them ate it together",
    ),
    ("heard a strange sound at night", "took a lamp and went outside", "It was only the wind that played with a door"),
)
_HELPERS = ("an owl", "a turtle", "an old woman", "a little bird", "a wise horse", "a friendly bee")
_ADVICE = (
    "Take your time",
    "Do not give up",
    "Follow the river",
    "Ask for help when you need it",
    "Start early and rest often",
)
_ENDS = (
    "From that day on, {name} was never sad again.",
    "{name} went home, tired and happy.",
    "And if nobody woke {name}, the {animal} is still asleep.",
    "Everyone remembered that day for a long time.",
)
_ASKED = (
    "Tell me a story about a {animal}.",
    "Tell a story about a {animal}.",
    "Write a story about a {animal}.",
    "Write a short story about a {animal}.",
    "Can you tell me a story about a {animal}?",
    "I want to hear a story about a {animal}.",
)
_ASKED_ANY = ("Tell me a story.", "Tell me a short story.", "Write a story.", "Do you know a story?", "a story please")


def story(rng: Random, animal: str | None = None) -> str:
    """Six to eight sentences."""
    animal = animal or rng.choice(_ANIMALS)
    name = rng.choice(TRAINED.names)
    wish, deed, discovery = rng.choice(_WISHES)
    parts = [
        f"Once upon a time, there was {rng.choice(_KINDS)} {animal} called {name}, who lived {rng.choice(_PLACES)}.",
        f"One day, {name} {wish}.",
        "But nobody knew how to help.",
        f'Then {name} met {rng.choice(_HELPERS)}, who said: "{rng.choice(_ADVICE)}."',
        f"So {name} {deed}.",
        f"{discovery}.",
        rng.choice(_ENDS).format(name=name, animal=animal),
    ]
    return " ".join(parts)


def request(rng: Random) -> tuple[str, str]:
    """A wish for a story, and the story."""
    if rng.random() < 0.3:
        return rng.choice(_ASKED_ANY), story(rng)
    animal = rng.choice(_ANIMALS)
    question = rng.choice(_ASKED).format(animal=animal)
    return question, story(rng, animal)
