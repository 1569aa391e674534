"""The fact families themselves, built from the tables."""

from __future__ import annotations

from aengine.demo import tables_nature as nature
from aengine.demo import tables_world as world
from aengine.demo.facts import Fact, Family
from aengine.demo.tables_nature import rows


def _an(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _facts(table: str) -> tuple[Fact, ...]:
    return tuple(tuple(row) for row in rows(table))


def _with_article(table: str) -> tuple[Fact, ...]:
    """Field 0 becomes "a cat"; the bare noun moves to the end."""
    return tuple((_an(row[0]), *row[1:], row[0]) for row in rows(table))


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


_CAPITALS = tuple((c.name, c.capital, c.continent, c.language) for c in world.COUNTRIES)
_SPELLING = tuple((word, "-".join(word.upper()), str(len(word))) for word in nature.SPELLING.split())
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MONTHS = tuple(name for name, _ in nature.MONTHS)


def _cycle(names: tuple[str, ...]) -> tuple[Fact, ...]:
    return tuple((name, names[(i + 1) % len(names)]) for i, name in enumerate(names))


def _words(column: int) -> tuple[Fact, ...]:
    language = ("English", "French", "Spanish", "German", "Italian")[column]
    return tuple((row[0], row[column], language) for row in rows(world.WORDS))


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
        ),
        ("{0} is the capital of what country?", "What country has {0} as its capital?"),
    ),
    Family(
        "continents",
        tuple((row[0], row[2]) for row in _CAPITALS),
        "{0} is in {1}.",
        ("the continent of {0}", "the continent that {0} is in"),
        ("Where is {0}?", "Which continent is {0} in?", "On which continent is {0}?", "In what continent is {0}?"),
        ("{0} is on which continent?", "Which continent does {0} belong to?"),
        ("{0} is a country in {1}.",),
    ),
    Family(
        "languages",
        tuple((row[0], row[3]) for row in _CAPITALS),
        "people in {0} speak {1}.",
        ("the language of {0}", "the main language of {0}"),
        ("Which language do people speak in {0}?", "What do people speak in {0}?", "What language is spoken in {0}?"),
        ("In {0}, which language is spoken?", "People in {0} speak which language?"),
    ),
    Family(
        "currencies",
        _facts(world.CURRENCIES),
        "the currency of {0} is {1}.",
        ("the currency of {0}", "the money of {0}"),
        ("What do people pay with in {0}?", "Which currency does {0} have?", "Which money is used in {0}?"),
        ("Which currency is used in {0}?", "In {0}, what do people pay with?"),
    ),
    Family(
        "colours",
        _facts(nature.COLOURS),
        "the colour of {0} is {1}.",
        ("the colour of {0}", "the color of {0}"),
        ("What colour is {0}?", "What color is {0}?", "Which colour does {0} have?", "Which color is {0}?"),
        ("What color does {0} have?", "{0} has which colour?"),
        ("the color of {0} is {1}.",),
    ),
    Family(
        "animal sounds",
        _with_article(nature.ANIMALS),
        "{0} says {1}.",
        ("the sound of {0}", "the sound {0} makes"),
        ("What does {0} say?", "What sound does {0} make?", "Which sound does {0} make?", "How does {0} sound?"),
        ("What is the sound that {0} makes?", "{0} makes which sound?"),
    ),
    Family(
        "young animals",
        _with_article(nature.ANIMALS),
        "a young {3} is called a {2}.",
        ("the name of a young {3}", "the word for a baby {3}", "the name for a {3}'s baby"),
        ("What do you call a baby {3}?", "How is a young {3} called?", "What is a baby {3} called?"),
        ("What is a young {3} called?", "A baby {3} is called what?"),
    ),
    Family(
        "legs",
        _with_article(nature.LEGS),
        "{0} has {1} legs.",
        ("the number of legs of {0}", "the number of legs {0} has"),
        ("How many legs does {0} have?", "How many legs has {0}?", "{0} has how many legs?"),
        ("Count the legs of {0}.", "On how many legs does {0} walk?"),
    ),
    Family(
        "homes",
        _with_article(nature.HOMES),
        "the home of {0} is the {1}.",
        ("the home of {0}", "the place where {0} lives"),
        ("Where does {0} live?", "Where is the home of {0}?", "In what does {0} live?"),
        ("Where can I find {0}?", "{0} lives where?"),
    ),
    Family(
        "opposites",
        tuple((row[i], row[1 - i]) for row in rows(nature.OPPOSITES) for i in (0, 1)),
        "the opposite of {0} is {1}.",
        ("the opposite of {0}", "the opposite of the word {0}", 'the opposite of "{0}"'),
        ("Which word is the opposite of {0}?", "What is the contrary of {0}?", "opposite of {0}"),
        ("Which word means the opposite of {0}?", "{0} is the opposite of what?"),
    ),
    Family(
        "plurals",
        _facts(nature.PLURALS),
        "the plural of {0} is {1}.",
        ("the plural of {0}", "the plural form of {0}", 'the plural of the word "{0}"'),
        ("One {0}, two what?", "How do you write more than one {0}?", "What is more than one {0} called?"),
        ("What do you call two of a {0}?", "Which word is the plural of {0}?"),
    ),
    Family(
        "past tenses",
        _facts(nature.PAST),
        "the past tense of {0} is {1}.",
        ("the past tense of {0}", "the past form of {0}", 'the past tense of the verb "{0}"'),
        ("How do you write {0} in the past tense?", "Which word is the past tense of {0}?"),
        ("In the past tense, what is {0}?", "Put {0} into the past tense."),
    ),
    Family(
        "next days",
        _cycle(nature.DAYS),
        "the day after {0} is {1}.",
        ("the day after {0}", "the day that comes after {0}", "the day following {0}"),
        ("Which day comes after {0}?", "Today is {0}. What day is tomorrow?", "What day follows {0}?"),
        ("After {0}, which day comes?", "Which day follows {0}?"),
    ),
    Family(
        "previous days",
        tuple((b, a) for a, b in _cycle(nature.DAYS)),
        "the day before {0} is {1}.",
        ("the day before {0}", "the day that comes before {0}"),
        ("Which day comes before {0}?", "Today is {0}. What day was yesterday?"),
        ("Before {0}, which day comes?", "If today is {0}, what day was yesterday?"),
    ),
    Family(
        "next months",
        _cycle(_MONTHS),
        "the month after {0} is {1}.",
        ("the month after {0}", "the month that comes after {0}", "the month following {0}"),
        ("Which month comes after {0}?", "It is {0}. Which month is next?", "What month follows {0}?"),
        ("After {0}, which month comes?", "Which month follows {0}?"),
    ),
    Family(
        "days in months",
        tuple((name, str(days)) for name, days in nature.MONTHS),
        "{0} has {1} days.",
        ("the number of days in {0}", "the number of days of {0}"),
        ("How many days does {0} have?", "How many days are in {0}?", "{0} has how many days?"),
        ("How many days has {0}?", "How long is {0} in days?"),
    ),
    Family(
        "chemical symbols",
        _facts(nature.ELEMENTS),
        "the chemical symbol of {0} is {1}.",
        ("the chemical symbol of {0}", "the symbol of {0}", "the chemical symbol for {0}"),
        ("Which symbol does {0} have?", "Which chemical symbol stands for {0}?", "What is {0}'s chemical symbol?"),
        ("Which chemical symbol does {0} have?", "In chemistry, what is the symbol of {0}?"),
    ),
    Family(
        "elements by symbol",
        tuple((row[1], row[0]) for row in rows(nature.ELEMENTS)),
        "{0} is the chemical symbol of {1}.",
        ("the element with the symbol {0}", "the chemical element {0}"),
        ("Which element has the symbol {0}?", "Which element is {0}?", "{0} is the symbol of which element?"),
        ("What element has the chemical symbol {0}?", "{0} stands for which element?"),
    ),
    Family(
        "atomic numbers",
        tuple((row[0], row[2]) for row in rows(nature.ELEMENTS)),
        "the atomic number of {0} is {1}.",
        ("the atomic number of {0}", "the atomic number of the element {0}"),
        ("Which atomic number does {0} have?", "What is {0}'s atomic number?", "atomic number of {0}"),
        ("Which number does the element {0} have?", "{0} has which atomic number?"),
    ),
    Family(
        "planets",
        tuple((nature.ORDINALS[i], name) for i, name in enumerate(nature.PLANETS)),
        "the {0} planet from the Sun is {1}.",
        ("the {0} planet from the Sun", "the {0} planet of the solar system", "the {0} planet"),
        ("Which planet is the {0} from the Sun?", "Which planet is {0} from the sun?"),
        ("Which is the {0} planet from the Sun?", "From the Sun, which planet comes {0}?"),
    ),
    Family(
        "months by number",
        tuple((nature.ORDINALS[i], name) for i, name in enumerate(_MONTHS)),
        "the {0} month of the year is {1}.",
        ("the {0} month of the year", "the {0} month"),
        ("Which month is the {0} of the year?", "Which month comes {0} in the year?"),
        ("Which is the {0} month of the year?", "In a year, which month comes {0}?"),
    ),
    Family(
        "letters",
        tuple((a, b) for a, b in zip(_ALPHABET, _ALPHABET[1:])),
        "the letter after {0} is {1}.",
        ("the letter after {0}", "the next letter after {0}", "the letter that comes after {0}"),
        (
            "Which letter comes after {0}?",
            "Which letter follows {0} in the alphabet?",
            "What comes after the letter {0}?",
        ),
        ("After {0}, which letter comes?", "In the alphabet, which letter follows {0}?"),
    ),
    Family(
        "polygons",
        _with_article(nature.POLYGONS),
        "{0} has {1} sides.",
        ("the number of sides of {0}", "the number of sides {0} has"),
        ("How many sides does {0} have?", "How many sides has {0}?", "{0} has how many sides?"),
        ("Count the sides of {0}.", "With how many sides is {0} drawn?"),
    ),
    Family(
        "roman numerals",
        tuple((str(n), _roman(n)) for n in range(1, 51)),
        "{0} in Roman numerals is {1}.",
        ("{0} in Roman numerals", "the Roman numeral for {0}", "the number {0} in Roman numerals"),
        ("How do you write {0} in Roman numerals?", "Write {0} as a Roman numeral."),
        ("What is the number {0} as a Roman numeral?", "In Roman numerals, how do you write {0}?"),
    ),
    Family(
        "numbers in words",
        tuple((str(n), number_in_words(n)) for n in range(100)),
        "{0} in words is {1}.",
        ("{0} in words", "the number {0} in words"),
        ("How do you write {0} in words?", "Write {0} in words.", "How do you say the number {0}?"),
        ("In words, what is {0}?", "Write out the number {0} in words."),
    ),
    Family(
        "words in digits",
        tuple((number_in_words(n), str(n)) for n in range(100)),
        "{0} in digits is {1}.",
        ("{0} in digits", "the number {0} in digits"),
        ("How do you write {0} in digits?", "Write {0} in digits.", "Write {0} as a number."),
        ("In digits, what is {0}?", "Write out the number {0} in digits."),
    ),
    Family(
        "jobs",
        _with_article(nature.JOBS),
        "{0} {1}.",
        ("the work of {0}", "the job of {0}"),
        ("What does {0} do?", "What is {0} doing at work?", "What is the job of {0}?"),
        ("What kind of work does {0} do?", "{0} does what?"),
    ),
    Family(
        "who does it",
        _with_article(nature.JOBS),
        "{0} {1}.",
        ("the person who {1}", "the name of the job of someone who {1}"),
        ("Who {1}?", "Which person {1}?", "What do you call someone who {1}?"),
        ("What is the name of a person who {1}?", "Tell me who {1}."),
    ),
    Family(
        "hello in languages",
        _facts(world.HELLO),
        "{1} 👋",
        ("hello in {0}", "the {0} word for hello"),
        ("How do you say hello in {0}?", "Say hello in {0}.", "Greet me in {0}.", "Say hello to me in {0}!"),
        ("In {0}, how do I say hello?", "Say hi in {0}, please."),
        ("Hello in {0}: {1} 👋",),
    ),
    Family(
        "thanks in languages",
        _facts(world.THANKS),
        "thank you in {0} is: {1} 🙏",
        ("thank you in {0}", "the {0} word for thank you"),
        ("How do you say thank you in {0}?", "Say thank you in {0}."),
        ("In {0}, how do I say thank you?",),
    ),
    Family(
        "translations",
        tuple(fact for column in range(1, 5) for fact in _words(column)),
        'the {2} word for "{0}" is "{1}".',
        ("the {2} word for {0}", 'the {2} word for "{0}"', "{0} in {2}", 'the word "{0}" in {2}'),
        (
            "How do you say {0} in {2}?",
            'How do you say "{0}" in {2}?',
            "Translate {0} into {2}.",
            'Translate "{0}" to {2}.',
        ),
        ("In {2}, what is the word for {0}?", "What do you call {0} in {2}?"),
    ),
    Family(
        "emoji",
        _with_article(nature.EMOJI),
        "{1}",
        ("the emoji for {0}", "the {2} emoji", "{0} as an emoji"),
        ("Which emoji shows {0}?", "Draw {0} as an emoji.", "Send me the {2} emoji."),
        ("Which emoji is {0}?", "Send me {0} as an emoji."),
        ("The emoji for {0} is {1}.",),
    ),
    Family(
        "spelling",
        _SPELLING,
        "{0} is spelled {1}.",
        ("the spelling of {0}", 'the spelling of the word "{0}"', "the letters of {0}"),
        ("Spell {0}.", "How do you spell {0}?", 'Spell the word "{0}".', "How is {0} spelled?"),
        ("How is the word {0} spelled?", "Can you spell {0}?"),
    ),
    Family(
        "word lengths",
        _SPELLING,
        "{0} has {2} letters.",
        ("the number of letters in {0}", 'the number of letters of the word "{0}"'),
        ("How many letters does {0} have?", 'How many letters are in "{0}"?', "Count the letters of {0}."),
        ("How long is the word {0}?", "Count the letters in the word {0}."),
    ),
    Family(
        "times tables",
        tuple((str(a), str(b), str(a * b)) for a in range(13) for b in range(13)),
        "{0} * {1} = {2}.",
        ("{0} * {1}", "{0} times {1}", "the product of {0} and {1}", "{0} x {1}"),
        ("How much is {0} times {1}?", "Multiply {0} by {1}.", "Calculate {0} * {1}.", "{0} * {1} =", "{0}*{1}"),
        ("How much do you get when you multiply {0} by {1}?", "Work out {0} times {1}."),
        ("{0} times {1} is {2}.",),
    ),
)
