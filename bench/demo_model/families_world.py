"""Families about countries."""

from __future__ import annotations

from bench.demo_model import tables_world as world
from bench.demo_model.facts import Family, facts_of

_CAPITALS = tuple((c.name, c.capital, c.continent, c.language) for c in world.COUNTRIES)

FAMILIES = (
    Family(
        "capitals",
        _CAPITALS,
        "the capital of {0} is {1}.",
        ("the capital of {0}", "the capital city of {0}", "{0}'s capital"),
        (
            "Which city is the capital of {0}?",
            "What is {0}'s capital city?",
            "capital of {0}",
            "{0} has which capital?",
            "{0}: what is its capital?",
            "For {0}: which capital?",
            "For the country {0}, which city is the capital?",
            "In {0}, which city is the capital?",
            "What do people in {0} call their capital?",
            "What's the capital of {0}",
        ),
        ("Which city serves as the capital of {0}?", "For {0}, what is the capital?"),
        ("{1} is the capital of {0}.", "{0} has the capital {1}.", "{0} is a country in {2} with the capital {1}."),
        "{0} is a country in {2}. People there speak {3}.",
    ),
    Family(
        "countries of capitals",
        tuple((row[1], row[0]) for row in _CAPITALS),
        "{0} is the capital of {1}.",
        ("the country with the capital {0}", "the country whose capital is {0}"),
        (
            "Which country has the capital {0}?",
            "{0} is the capital of which country?",
            "Of which country is {0} the capital?",
            "What country is {0} the capital of?",
            "What country has the capital {0}?",
            "{0} is the capital of which land?",
            "{0}: the capital of which country?",
        ),
        ("{0} is the capital of what country?", "What country has {0} as its capital?"),
    ),
    Family(
        "continents",
        tuple((row[0], row[2]) for row in _CAPITALS),
        "{0} is in {1}.",
        ("the continent of {0}", "the continent that {0} is in"),
        (
            "Where is {0}?",
            "Which continent is {0} in?",
            "On which continent is {0}?",
            "In what continent is {0}?",
            "{0} lies on which continent?",
            "{0}: which continent?",
            "To which continent does {0} belong?",
            "{0} belongs to which continent?",
        ),
        ("{0} is on which continent?", "Which continent does {0} belong to?"),
        ("{0} is a country in {1}.",),
    ),
    Family(
        "languages",
        tuple((row[0], row[3]) for row in _CAPITALS),
        "people in {0} speak {1}.",
        ("the language of {0}", "the main language of {0}"),
        (
            "Which language do people speak in {0}?",
            "What do people speak in {0}?",
            "What language is spoken in {0}?",
            "{0}: which language?",
            "Which language is spoken in {0}?",
            "{0} has which language?",
        ),
        ("In {0}, which language is spoken?", "People in {0} speak which language?"),
    ),
    Family(
        "currencies",
        facts_of(world.CURRENCIES),
        "the currency of {0} is {1}.",
        ("the currency of {0}", "the money of {0}"),
        (
            "What do people pay with in {0}?",
            "Which currency does {0} have?",
            "Which money is used in {0}?",
            "{0} has which currency?",
            "{0}: which currency?",
            "Which currency do people use in {0}?",
        ),
        ("Which currency is used in {0}?", "In {0}, what do people pay with?"),
    ),
)
