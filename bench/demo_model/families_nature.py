"""Families about animals, things and everyday words."""

from __future__ import annotations

from bench.demo_model import tables_nature as nature
from bench.demo_model import tables_words as words
from bench.demo_model.facts import Family, facts_of, facts_with_article
from bench.demo_model.tables_nature import rows

FAMILIES = (
    Family(
        "colours",
        facts_of(nature.COLOURS),
        "the colour of {0} is {1}.",
        ("the colour of {0}", "the color of {0}"),
        (
            "What colour is {0}?",
            "What color is {0}?",
            "Which colour does {0} have?",
            "Which color is {0}?",
            "{0} is which colour?",
            "{0}: which color?",
            "{0} has which color?",
        ),
        ("What color does {0} have?", "{0} has which colour?"),
        ("the color of {0} is {1}.",),
    ),
    Family(
        "animal sounds",
        facts_with_article(nature.ANIMALS),
        "{0} says {1}.",
        ("the sound of {0}", "the sound {0} makes"),
        (
            "What does {0} say?",
            "What sound does {0} make?",
            "Which sound does {0} make?",
            "How does {0} sound?",
            "{0} says what?",
            "{0}: which sound?",
            "Which sound comes from {0}?",
        ),
        ("What is the sound that {0} makes?", "{0} makes which sound?"),
    ),
    Family(
        "young animals",
        facts_with_article(nature.ANIMALS),
        "a young {3} is called a {2}.",
        ("the name of a young {3}", "the word for a baby {3}", "the name for a {3}'s baby"),
        (
            "What do you call a baby {3}?",
            "How is a young {3} called?",
            "What is a baby {3} called?",
            "A young {3}, what is it called?",
            "What name does a young {3} have?",
            "A baby {3} has which name?",
        ),
        ("What is a young {3} called?", "A baby {3} is called what?"),
    ),
    Family(
        "legs",
        facts_with_article(nature.LEGS),
        "{0} has {1} legs.",
        ("the number of legs of {0}", "the number of legs {0} has"),
        (
            "How many legs does {0} have?",
            "How many legs has {0}?",
            "{0} has how many legs?",
            "{0} walks on how many legs?",
            "{0}: how many legs?",
            "On how many legs does {0} stand?",
            "Count the legs: {0}",
        ),
        ("Count the legs of {0}.", "On how many legs does {0} walk?"),
    ),
    Family(
        "homes",
        facts_with_article(nature.HOMES),
        "the home of {0} is the {1}.",
        ("the home of {0}", "the place where {0} lives"),
        (
            "Where does {0} live?",
            "Where is the home of {0}?",
            "In what does {0} live?",
            "{0}: where is its home?",
            "{0} lives in what?",
            "Where do we find {0}?",
            "{0} has its home where?",
            "Where can I find the home of {0}?",
            "Where can {0} be found?",
        ),
        ("Where can I find {0}?", "{0} lives where?"),
    ),
    Family(
        "opposites",
        tuple((row[i], row[1 - i]) for row in rows(words.OPPOSITES) for i in (0, 1)),
        "the opposite of {0} is {1}.",
        ("the opposite of {0}", "the opposite of the word {0}", 'the opposite of "{0}"'),
        (
            "Which word is the opposite of {0}?",
            "What is the contrary of {0}?",
            "opposite of {0}",
            "{0}: what is the opposite?",
            "{0} is the contrary of what?",
            "What word is opposite to {0}?",
            "What means the opposite of {0}?",
        ),
        ("Which word means the opposite of {0}?", "{0} is the opposite of what?"),
    ),
    Family(
        "plurals",
        facts_of(words.PLURALS),
        "the plural of {0} is {1}.",
        ("the plural of {0}", "the plural form of {0}", 'the plural of the word "{0}"'),
        (
            "One {0}, two what?",
            "How do you write more than one {0}?",
            "What is more than one {0} called?",
            "{0}: what is the plural?",
            "Which word is used for two of a {0}?",
            "Two of a {0} are called what?",
        ),
        ("What do you call two of a {0}?", "Which word is the plural of {0}?"),
    ),
    Family(
        "past tenses",
        facts_of(words.PAST),
        "the past tense of {0} is {1}.",
        ("the past tense of {0}", "the past form of {0}", 'the past tense of the verb "{0}"'),
        (
            "How do you write {0} in the past tense?",
            "Which word is the past tense of {0}?",
            "{0}: what is the past tense?",
            "Today I {0}. What did I do yesterday?",
            "Put the verb {0} in the past.",
        ),
        ("In the past tense, what is {0}?", "Put {0} into the past tense."),
    ),
)
