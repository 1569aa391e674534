"""Families about numbers, jobs, languages, emoji, spelling and the times tables."""

from __future__ import annotations

from bench.demo_model import tables_nature as nature
from bench.demo_model import tables_words as words
from bench.demo_model import tables_world as world
from bench.demo_model.facts import Fact, Family, facts_of, facts_with_article
from bench.demo_model.tables_nature import rows


def number_in_words(number: int) -> str:
    """0 to 99 in English."""
    if number < 20:
        return nature.SMALL_NUMBERS[number]
    ten = nature.TENS[number // 10 - 2]
    return f"{ten}-{nature.SMALL_NUMBERS[number % 10]}" if number % 10 else ten


def _roman(number: int) -> str:
    steps = ((50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))
    text = ""
    for value, letters in steps:
        while number >= value:
            text, number = text + letters, number - value
    return text


def _translations(column: int) -> tuple[Fact, ...]:
    language = ("English", "French", "Spanish", "German", "Italian")[column]
    return tuple((row[0], row[column], language) for row in rows(world.WORDS))


_SPELLING = tuple((word, "-".join(word.upper()), str(len(word))) for word in words.SPELLING.split())

FAMILIES = (
    Family(
        "roman numerals",
        tuple((str(n), _roman(n)) for n in range(1, 51)),
        "{0} in Roman numerals is {1}.",
        ("{0} in Roman numerals", "the Roman numeral for {0}", "the number {0} in Roman numerals"),
        (
            "How do you write {0} in Roman numerals?",
            "Write {0} as a Roman numeral.",
            "{0} as a Roman numeral",
            "In Roman numerals: {0}",
            "What is {0} as a Roman numeral?",
        ),
        ("What is the number {0} as a Roman numeral?", "In Roman numerals, how do you write {0}?"),
    ),
    Family(
        "numbers in words",
        tuple((str(n), number_in_words(n)) for n in range(100)),
        "{0} in words is {1}.",
        ("{0} in words", "the number {0} in words"),
        (
            "How do you write {0} in words?",
            "Write {0} in words.",
            "How do you say the number {0}?",
            "In words: {0}",
            "Write out {0} in words.",
            "{0} as words",
        ),
        ("In words, what is {0}?", "Write out the number {0} in words."),
    ),
    Family(
        "words in digits",
        tuple((number_in_words(n), str(n)) for n in range(100)),
        "{0} in digits is {1}.",
        ("{0} in digits", "the number {0} in digits"),
        (
            "How do you write {0} in digits?",
            "Write {0} in digits.",
            "Write {0} as a number.",
            "In digits: {0}",
            "Write out {0} in digits.",
            "{0} as digits",
        ),
        ("In digits, what is {0}?", "Write out the number {0} in digits."),
    ),
    Family(
        "jobs",
        facts_with_article(nature.JOBS),
        "{0} {1}.",
        ("the work of {0}", "the job of {0}"),
        (
            "What does {0} do?",
            "What is {0} doing at work?",
            "What is the job of {0}?",
            "{0}: what work is it?",
            "What kind of job is {0}?",
            "{0} is someone who does what?",
        ),
        ("What kind of work does {0} do?", "{0} does what?"),
    ),
    Family(
        "who does it",
        facts_with_article(nature.JOBS),
        "{0} {1}.",
        ("the person who {1}", "the name of the job of someone who {1}"),
        (
            "Who {1}?",
            "Which person {1}?",
            "What do you call someone who {1}?",
            "What is a person called who {1}?",
            "Tell me the person who {1}.",
            "Who is it that {1}?",
        ),
        ("What is the name of a person who {1}?", "Tell me who {1}."),
    ),
    Family(
        "hello in languages",
        facts_of(world.HELLO),
        "{1} 👋",
        ("hello in {0}", "the {0} word for hello"),
        (
            "How do you say hello in {0}?",
            "Say hello in {0}.",
            "Greet me in {0}.",
            "Say hello to me in {0}!",
            "In {0}: hello",
            "Hello in {0}, please!",
            "Say hi to me in {0}.",
        ),
        ("In {0}, how do I say hello?", "Say hi in {0}, please."),
        ("Hello in {0}: {1} 👋",),
    ),
    Family(
        "thanks in languages",
        facts_of(world.THANKS),
        "thank you in {0} is: {1} 🙏",
        ("thank you in {0}", "the {0} word for thank you"),
        (
            "How do you say thank you in {0}?",
            "Say thank you in {0}.",
            "In {0}: thank you",
            "I want to say thank you in {0}.",
        ),
        ("In {0}, how do I say thank you?",),
    ),
    Family(
        "translations",
        tuple(fact for column in range(1, 5) for fact in _translations(column)),
        'the {2} word for "{0}" is "{1}".',
        ("the {2} word for {0}", 'the {2} word for "{0}"', "{0} in {2}", 'the word "{0}" in {2}'),
        (
            "How do you say {0} in {2}?",
            'How do you say "{0}" in {2}?',
            "Translate {0} into {2}.",
            'Translate "{0}" to {2}.',
            "{0}: what is it in {2}?",
            "In {2}: {0}",
            "What is {0} called in {2}?",
        ),
        ("In {2}, what is the word for {0}?", "What do you call {0} in {2}?"),
    ),
    Family(
        "emoji",
        facts_with_article(nature.EMOJI),
        "{1}",
        ("the emoji for {0}", "the {2} emoji", "{0} as an emoji"),
        (
            "Which emoji shows {0}?",
            "Draw {0} as an emoji.",
            "Send me the {2} emoji.",
            "{0}: which emoji?",
            "Which emoji stands for {0}?",
            "Send {0} as an emoji.",
        ),
        ("Which emoji is {0}?", "Send me {0} as an emoji."),
        ("The emoji for {0} is {1}.",),
    ),
    Family(
        "spelling",
        _SPELLING,
        "{0} is spelled {1}.",
        ("the spelling of {0}", 'the spelling of the word "{0}"', "the letters of {0}"),
        (
            "Spell {0}.",
            "How do you spell {0}?",
            'Spell the word "{0}".',
            "How is {0} spelled?",
            "{0}: how is it spelled?",
            "Spell the word {0}.",
            "Please spell {0}.",
            "How is the word {0} written?",
            "Can you spell the word {0}?",
        ),
        ("How is the word {0} spelled?", "Can you spell {0}?"),
    ),
    Family(
        "word lengths",
        _SPELLING,
        "{0} has {2} letters.",
        ("the number of letters in {0}", 'the number of letters of the word "{0}"'),
        (
            "How many letters does {0} have?",
            'How many letters are in "{0}"?',
            "Count the letters of {0}.",
            "How long is {0}?",
            "How long is the name {0}?",
            "{0}: how many letters?",
            "{0} has how many letters?",
            "How many letters has the word {0}?",
            "{0} is how long?",
            "Count the letters: {0}",
        ),
        ("How long is the word {0}?", "Count the letters in the word {0}."),
    ),
    Family(
        "times tables",
        tuple((str(a), str(b), str(a * b)) for a in range(13) for b in range(13)),
        "{0} * {1} = {2}.",
        ("{0} * {1}", "{0} times {1}", "the product of {0} and {1}", "{0} x {1}"),
        (
            "How much is {0} times {1}?",
            "Multiply {0} by {1}.",
            "Calculate {0} * {1}.",
            "{0} * {1} =",
            "{0}*{1}",
            "{0} multiplied by {1}",
            "What is {0} multiplied by {1}?",
            "How much do I get for {0} times {1}?",
        ),
        ("How much do you get when you multiply {0} by {1}?", "Work out {0} times {1}."),
        ("{0} times {1} is {2}.",),
    ),
)
