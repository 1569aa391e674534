"""Families about the calendar, elements, planets, letters and shapes."""

from __future__ import annotations

from itertools import pairwise

from bench.demo_model import tables_nature as nature
from bench.demo_model.facts import Fact, Family, facts_of, facts_with_article
from bench.demo_model.tables_nature import rows

_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MONTHS = tuple(name for name, _ in nature.MONTHS)


def _cycle(names: tuple[str, ...]) -> tuple[Fact, ...]:
    return tuple((name, names[(i + 1) % len(names)]) for i, name in enumerate(names))


FAMILIES = (
    Family(
        "next days",
        _cycle(nature.DAYS),
        "the day after {0} is {1}.",
        ("the day after {0}", "the day that comes after {0}", "the day following {0}"),
        (
            "Which day comes after {0}?",
            "Today is {0}. What day is tomorrow?",
            "What day follows {0}?",
            "After {0} comes which day?",
            "{0}: which day is next?",
            "What comes after {0}?",
            "If today is {0}, what is tomorrow?",
            "After {0}, what day is it?",
        ),
        ("After {0}, which day comes?", "Which day follows {0}?"),
    ),
    Family(
        "previous days",
        tuple((b, a) for a, b in _cycle(nature.DAYS)),
        "the day before {0} is {1}.",
        ("the day before {0}", "the day that comes before {0}"),
        (
            "Which day comes before {0}?",
            "Today is {0}. What day was yesterday?",
            "Before {0} comes which day?",
            "{0}: which day was before?",
            "What comes before {0}?",
            "If it is {0} today, which day was yesterday?",
            "Before {0}, what day is it?",
        ),
        ("Before {0}, which day comes?", "If today is {0}, what day was yesterday?"),
    ),
    Family(
        "next months",
        _cycle(_MONTHS),
        "the month after {0} is {1}.",
        ("the month after {0}", "the month that comes after {0}", "the month following {0}"),
        (
            "Which month comes after {0}?",
            "It is {0}. Which month is next?",
            "What month follows {0}?",
            "After {0} comes which month?",
            "{0}: which month is next?",
            "What comes after {0}?",
            "If this month is {0}, what is the next one?",
            "After {0}, what month is it?",
        ),
        ("After {0}, which month comes?", "Which month follows {0}?"),
    ),
    Family(
        "days in months",
        tuple((name, str(days)) for name, days in nature.MONTHS),
        "{0} has {1} days.",
        ("the number of days in {0}", "the number of days of {0}"),
        (
            "How many days does {0} have?",
            "How many days are in {0}?",
            "{0} has how many days?",
            "How long is {0}?",
            "{0} is how long?",
            "{0}: how many days?",
            "How many days long is {0}?",
        ),
        ("How many days has {0}?", "How long is {0} in days?"),
    ),
    Family(
        "chemical symbols",
        facts_of(nature.ELEMENTS),
        "the chemical symbol of {0} is {1}.",
        ("the chemical symbol of {0}", "the symbol of {0}", "the chemical symbol for {0}"),
        (
            "Which symbol does {0} have?",
            "Which chemical symbol stands for {0}?",
            "What is {0}'s chemical symbol?",
            "{0}: which symbol?",
            "{0} has which symbol?",
            "Which symbol is used for {0}?",
        ),
        ("Which chemical symbol does {0} have?", "In chemistry, what is the symbol of {0}?"),
    ),
    Family(
        "elements by symbol",
        tuple((row[1], row[0]) for row in rows(nature.ELEMENTS)),
        "{0} is the chemical symbol of {1}.",
        ("the element with the symbol {0}", "the chemical element {0}"),
        (
            "Which element has the symbol {0}?",
            "Which element is {0}?",
            "{0} is the symbol of which element?",
            "{0}: which element?",
            "{0} means which element?",
            "What element is {0}?",
            "What element has the symbol {0}?",
        ),
        ("What element has the chemical symbol {0}?", "{0} stands for which element?"),
    ),
    Family(
        "atomic numbers",
        tuple((row[0], row[2]) for row in rows(nature.ELEMENTS)),
        "the atomic number of {0} is {1}.",
        ("the atomic number of {0}", "the atomic number of the element {0}"),
        (
            "Which atomic number does {0} have?",
            "What is {0}'s atomic number?",
            "atomic number of {0}",
            "{0}: which atomic number?",
            "Which number has {0}?",
            "What number does {0} have?",
            "{0} has which number?",
            "Which number does {0} have among the elements?",
            "The element {0} has which number?",
        ),
        ("Which number does the element {0} have?", "{0} has which atomic number?"),
    ),
    Family(
        "planets",
        tuple((nature.ORDINALS[i], name) for i, name in enumerate(nature.PLANETS)),
        "the {0} planet from the Sun is {1}.",
        ("the {0} planet from the Sun", "the {0} planet of the solar system", "the {0} planet"),
        (
            "Which planet is the {0} from the Sun?",
            "Which planet is {0} from the sun?",
            "Which planet comes {0}?",
            "From the Sun, what is the {0} planet?",
        ),
        ("Which is the {0} planet from the Sun?", "From the Sun, which planet comes {0}?"),
    ),
    Family(
        "months by number",
        tuple((nature.ORDINALS[i], name) for i, name in enumerate(_MONTHS)),
        "the {0} month of the year is {1}.",
        ("the {0} month of the year", "the {0} month"),
        (
            "Which month is the {0} of the year?",
            "Which month comes {0} in the year?",
            "Which month comes {0}?",
            "In the year, what is the {0} month?",
        ),
        ("Which is the {0} month of the year?", "In a year, which month comes {0}?"),
    ),
    Family(
        "letters",
        tuple((a, b) for a, b in pairwise(_ALPHABET)),
        "the letter after {0} is {1}.",
        ("the letter after {0}", "the next letter after {0}", "the letter that comes after {0}"),
        (
            "Which letter comes after {0}?",
            "Which letter follows {0} in the alphabet?",
            "What comes after the letter {0}?",
            "After {0} comes which letter?",
            "{0}: which letter is next?",
            "After {0}, what is the next letter?",
            "In the alphabet, what comes after {0}?",
        ),
        ("After {0}, which letter comes?", "In the alphabet, which letter follows {0}?"),
    ),
    Family(
        "polygons",
        facts_with_article(nature.POLYGONS),
        "{0} has {1} sides.",
        ("the number of sides of {0}", "the number of sides {0} has"),
        (
            "How many sides does {0} have?",
            "How many sides has {0}?",
            "{0} has how many sides?",
            "{0}: how many sides?",
            "{0} is drawn with how many sides?",
            "Count the sides: {0}",
        ),
        ("Count the sides of {0}.", "With how many sides is {0} drawn?"),
    ),
)
