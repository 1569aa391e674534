"""Values that fill objects, tool calls and stories: names, cities, words, and made-up words.

Every pool has values that only held-out problems use, so that copying is examined and not remembering.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_NAMES = """
Mia Noah Emma Liam Olivia Ben Anna Paul Clara Max Lena Tom Sara Leo Nina Felix Eva Oscar Julia Adam Maria David
Laura Peter Sophie Hugo Alice Jack Ruby Sam Zoe Carl Ida Emil Rosa Ivan Olga Yuki Hana Ken Aisha Omar Leila Amir
Priya Ravi Chen Mei Jin Kofi Ama Zara Diego Lucia Pablo Carmen Marco Gina Luca Elsa Nils Freya Erik Astrid Jonas
Greta Victor Irene Simon Judith Martin Helen George Kate Robert Susan Frank Linda Henry Alex Robin Chris Dana
"""
_UNSEEN_NAMES = "Tobias Marlene Quentin Isadora Bruno Wanda Ruben Sigrid Milo Petra Anton Thea Caspar Nadia Edgar"
_CITIES = """
Paris London Berlin Rome Madrid Vienna Oslo Tokyo Cairo Lima Prague Warsaw Dublin Athens Lisbon Boston Chicago
Seattle Denver Munich Hamburg Zurich Geneva Milan Naples Lyon Bordeaux Seville Porto Bergen Gothenburg Turku
Krakow Delhi Mumbai Shanghai Osaka Kyoto Seoul Hanoi Bangkok Sydney Melbourne Toronto Montreal Vancouver Nairobi
Lagos Accra Tunis Dakar Bogota Quito Santiago Moscow Kyiv Minsk Riga Helsinki Stockholm Copenhagen Amsterdam
"""
_UNSEEN_CITIES = "Valencia Leipzig Antwerp Houston Dallas Nagoya Busan Perth Calgary Tampere Aarhus Salzburg Bologna"
_WORDS = """
red green blue yellow black white orange purple small large fast slow new old warm cold bright dark soft hard
apple bread milk cheese coffee tea sugar rice salt water book lamp chair table phone laptop pencil paper bottle
garden river forest mountain beach island bridge tower museum school office market station kitchen music dance
football chess tennis running swimming reading cooking painting travel history science art nature space ocean
"""
_UNSEEN_WORDS = "violin castle harbor blanket ladder mirror hammer pepper candle pillow meadow wagon marble anchor"
_SYLLABLES = "ba be bo da de di do fa fi ga ge go ka ke ki ko la le li lo lu ma me mi mo na ne no pa pe po ra re ri ro ru sa se si so ta te ti to va ve vi vo za zo".split()
_ENDINGS = ("n", "r", "l", "s", "x", "", "", "m", "nd", "rt", "lin", "ton", "sta", "wick")


@dataclass(frozen=True, slots=True)
class Pool:
    """The values of one part, trained or held out."""

    names: tuple[str, ...]
    cities: tuple[str, ...]
    words: tuple[str, ...]


TRAINED = Pool(tuple(_NAMES.split()), tuple(_CITIES.split()), tuple(_WORDS.split()))
HELD_OUT = Pool(tuple(_UNSEEN_NAMES.split()), tuple(_UNSEEN_CITIES.split()), tuple(_UNSEEN_WORDS.split()))


def made_up(rng: Random) -> str:
    """A word that means nothing, for copying."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3))) + rng.choice(_ENDINGS)


def name(rng: Random, pool: Pool) -> str:
    """A person's name; in training one in four is made up."""
    if pool is TRAINED and rng.random() < 0.25:
        return made_up(rng).capitalize()
    return rng.choice(pool.names)


def city(rng: Random, pool: Pool) -> str:
    """A place; in training one in four is made up."""
    if pool is TRAINED and rng.random() < 0.25:
        return made_up(rng).capitalize()
    return rng.choice(pool.cities)


def word(rng: Random, pool: Pool) -> str:
    """A lower-case word; in training one in four is made up."""
    if pool is TRAINED and rng.random() < 0.25:
        return made_up(rng)
    return rng.choice(pool.words)


def phrase(rng: Random, pool: Pool, longest: int = 4) -> str:
    """One to `longest` words."""
    return " ".join(word(rng, pool) for _ in range(rng.randint(1, longest)))
