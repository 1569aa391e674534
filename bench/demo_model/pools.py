"""Values that fill objects, tool calls and stories: names, cities, words, and made-up words.

Each pool has values that are copied in held-out problems only, so that copying is examined and not remembering.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from bench.demo_model import tables_nature, tables_words, tables_world

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
# Made-up words sound like any words: a beginning, a vowel and an end per syllable.
_STARTS = """
b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kn l m n p ph pl pr qu r s sc sh sk sl sm sn sp st str sw t th tr
tw v w wh y z b c d f g h l m n p r s t
"""
_VOWELS = "a e i o u a e i o a e ai ea ee ie oa oo ou au y ia io"
_STOPS = "n r l s t d m k p th ck ng nd nt rt st ll ss x lm ph g b tch rd rn ls"
_SOUNDS = tuple(tuple(sounds.split()) for sounds in (_STARTS, _VOWELS, _STOPS))
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Pool:
    """The values of one part, trained or held out."""

    names: tuple[str, ...]
    cities: tuple[str, ...]
    words: tuple[str, ...]


TRAINED = Pool(tuple(_NAMES.split()), tuple(_CITIES.split()), tuple(_WORDS.split()))
HELD_OUT = Pool(tuple(_UNSEEN_NAMES.split()), tuple(_UNSEEN_CITIES.split()), tuple(_UNSEEN_WORDS.split()))


def _table_words() -> tuple[str, ...]:
    """Every single word of the fact tables, without the held-out values."""
    tables = (tables_nature, tables_words, tables_world)
    named = [value for table in tables for name, value in vars(table).items() if not name.startswith("__")]
    text = " ".join(value for value in named if isinstance(value, str)).replace("|", " ")
    words = {word for word in text.split() if word.isalpha() and word.isascii()}
    held_out = {value.lower() for value in (*HELD_OUT.names, *HELD_OUT.cities, *HELD_OUT.words)}
    constants = {"true", "false", "null", "on", "off", "and"}  # they would not be read as words
    return tuple(sorted(word for word in words if word.lower() not in held_out | constants))


TABLE_WORDS = _table_words()


def made_up(rng: Random) -> str:
    """A word that means nothing, for copying."""
    if rng.random() < 0.1:
        return "".join(rng.choices(_LETTERS, k=rng.randint(2, 7)))
    starts, vowels, stops = _SOUNDS
    word = ""
    for _ in range(rng.choice((1, 2, 2, 2, 3))):
        word += (rng.choice(starts) if rng.random() < 0.8 else "") + rng.choice(vowels)
        word += rng.choice(stops) if rng.random() < 0.5 else ""
    return word if word not in (*HELD_OUT.words, "true", "null", "on", "and") else "nono"


def _value(rng: Random, own: tuple[str, ...], pool: Pool, *, capital: bool) -> str:
    """In training, four values in ten are the pool's own; the others come from the tables or are made up."""
    roll = rng.random()
    if pool is HELD_OUT or roll < 0.4:
        return rng.choice(own)
    word = rng.choice(TABLE_WORDS) if roll < 0.6 else made_up(rng)
    word = word.capitalize() if capital else word
    return rng.choice(own) if word in HELD_OUT.names + HELD_OUT.cities else word


def name(rng: Random, pool: Pool) -> str:
    """A person's name."""
    return _value(rng, pool.names, pool, capital=True)


def city(rng: Random, pool: Pool) -> str:
    """A place."""
    return _value(rng, pool.cities, pool, capital=True)


def word(rng: Random, pool: Pool) -> str:
    """A word, mostly in lower case."""
    return _value(rng, pool.words, pool, capital=False)


def phrase(rng: Random, pool: Pool, longest: int = 4) -> str:
    """One to `longest` words."""
    return " ".join(word(rng, pool) for _ in range(rng.randint(1, longest)))
