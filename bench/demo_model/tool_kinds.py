"""The kinds of tools in the corpus: their names, parameters, and requests for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench.demo_model import pools
from bench.demo_model.pools import Pool

Value = str | int | bool


Maker = Callable[[Random, Pool], Value]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument: its possible names, JSON type and values."""

    names: tuple[str, ...]
    type: str
    make: Maker


@dataclass(frozen=True, slots=True)
class Kind:
    """What a tool does, under all its names. Requests refer to arguments by position."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    unseen: tuple[str, ...]
    result: str = ""  # what the tool answers; empty: {"ok": true}
    reply: str = "Done."  # what the model then says; formats over the arguments


def _city(rng: Random, pool: Pool) -> Value:
    return pools.city(rng, pool)


def _name(rng: Random, pool: Pool) -> Value:
    return pools.name(rng, pool)


def _word(rng: Random, pool: Pool) -> Value:
    return pools.word(rng, pool)


def _phrase(rng: Random, pool: Pool) -> Value:
    return pools.phrase(rng, pool, 4)


# Those that draw from a pool, whose held-out values are new in themselves.
POOLED = (_city, _name, _word, _phrase)


def _number(low: int, high: int) -> Maker:
    return lambda rng, pool: rng.randint(low, high)


def _clock(rng: Random, _: Pool) -> Value:
    return f"{rng.randrange(24):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def _one_of(*values: str) -> Maker:
    return lambda rng, pool: rng.choice(values)


_PLACE = Parameter(("city", "location", "place", "town"), "string", _city)


_LANGUAGE = Parameter(
    ("language", "target", "to"), "string", _one_of("French", "Spanish", "German", "Italian", "Polish", "Dutch")
)


_ROOMS = ("kitchen", "bedroom", "office", "garden", "hall", "garage", "cellar", "bathroom", "attic", "nursery")


KINDS = (
    Kind(
        ("get_weather", "get_current_weather", "weather", "weather_now"),
        "Get the current weather of a city.",
        (_PLACE,),
        (
            "What is the weather in {0}?",
            "What's the weather like in {0}?",
            "How is the weather in {0}?",
            "How is the weather in {0} today?",
            "Tell me the weather in {0}.",
            "Is it raining in {0}?",
            "Weather in {0}?",
            "Get the weather for {0}.",
            "I am going to {0}. How is the weather?",
        ),
        ("Please check the weather in {0}.", "What is the weather in {0} right now?", "Will I need a coat in {0}?"),
        '{{"temperature": {t}, "sky": "{sky}"}}',
        "It is {t} degrees and {sky} in {0}.",
    ),
    Kind(
        ("get_time", "local_time", "current_time", "time_in"),
        "Get the local time of a city.",
        (_PLACE,),
        (
            "What time is it in {0}?",
            "What is the time in {0}?",
            "Tell me the time in {0}.",
            "How late is it in {0}?",
            "Time in {0}?",
            "Which time is it now in {0}?",
        ),
        ("What time is it in {0} right now?", "Please tell me the local time in {0}."),
        '{{"time": "{clock}"}}',
        "It is {clock} in {0}.",
    ),
    Kind(
        ("set_timer", "start_timer", "timer"),
        "Start a timer.",
        (Parameter(("minutes", "duration", "length"), "integer", _number(1, 90)),),
        (
            "Set a timer for {0} minutes.",
            "Start a timer of {0} minutes.",
            "Timer for {0} minutes, please.",
            "Wake me in {0} minutes.",
            "Give me {0} minutes.",
        ),
        ("Can you set a timer for {0} minutes?", "Please start a {0} minute timer."),
    ),
    Kind(
        ("set_alarm", "alarm", "wake_me"),
        "Set an alarm.",
        (Parameter(("time", "at", "when"), "string", _clock),),
        ("Set an alarm for {0}.", "Wake me at {0}.", "Alarm at {0}, please.", "I have to get up at {0}."),
        ("Can you set an alarm for {0}?", "Please wake me up at {0}."),
    ),
    Kind(
        ("add", "add_numbers", "sum"),
        "Add two numbers.",
        (
            Parameter(("a", "x", "first"), "integer", _number(0, 999)),
            Parameter(("b", "y", "second"), "integer", _number(0, 999)),
        ),
        (
            "Use the tool to add {0} and {1}.",
            "Add {0} and {1} with the tool.",
            "Let the tool add {0} and {1}.",
            "Add {0} and {1}.",
            "What is {0} + {1}?",
            "What is {0} plus {1}?",
        ),
        ("Please use the tool to add {0} and {1}.",),
        '{{"result": {sum}}}',
        "The result is {sum}.",
    ),
    Kind(
        ("multiply", "multiply_numbers", "product"),
        "Multiply two numbers.",
        (
            Parameter(("a", "x", "first"), "integer", _number(0, 999)),
            Parameter(("b", "y", "second"), "integer", _number(0, 999)),
        ),
        (
            "Use the tool to multiply {0} by {1}.",
            "Multiply {0} by {1} with the tool.",
            "Let the tool multiply {0} and {1}.",
            "Multiply {0} by {1}.",
            "What is {0} * {1}?",
            "What is {0} times {1}?",
        ),
        ("Please use the tool to multiply {0} by {1}.",),
        '{{"result": {product}}}',
        "The result is {product}.",
    ),
    Kind(
        ("send_message", "message", "send_text"),
        "Send a message to a person.",
        (
            Parameter(("to", "recipient", "person"), "string", _name),
            Parameter(("text", "message", "body"), "string", _phrase),
        ),
        (
            'Send {0} the message "{1}".',
            'Send the message "{1}" to {0}.',
            'Write "{1}" to {0}.',
            'Tell {0}: "{1}"',
            'Text {0} "{1}".',
        ),
        ('Can you send "{1}" to {0}?', 'Please send {0} the text "{1}".'),
    ),
    Kind(
        ("search", "web_search", "find_pages"),
        "Search the web.",
        (Parameter(("query", "q", "terms"), "string", _phrase),),
        (
            'Search for "{0}".',
            'Search the web for "{0}".',
            'Look up "{0}".',
            'Find pages about "{0}".',
            "Search for {0}",
        ),
        ('Can you search for "{0}"?', 'Please look up "{0}" on the web.'),
    ),
    Kind(
        ("translate", "translate_text", "translation"),
        "Translate a text.",
        (Parameter(("text", "phrase", "input"), "string", _phrase), _LANGUAGE),
        (
            'Translate the text "{0}" into {1}.',
            'Use the tool to translate "{0}" into {1}.',
            'Put "{0}" into {1} with the tool.',
        ),
        ('Please use the tool to translate "{0}" into {1}.',),
    ),
    Kind(
        ("play_music", "play", "play_song"),
        "Play a song.",
        (Parameter(("title", "song", "name"), "string", _phrase),),
        ('Play "{0}".', 'Play the song "{0}".', 'I want to hear "{0}".', 'Put on "{0}".'),
        ('Can you play "{0}"?', 'Please play the song "{0}" for me.'),
    ),
    Kind(
        ("set_light", "light", "switch_light"),
        "Switch the light in a room.",
        (
            Parameter(("room", "where"), "string", _one_of(*_ROOMS)),
            Parameter(("on", "state"), "boolean", lambda rng, _: rng.random() < 0.5),
        ),
        (
            "Turn {1} the light in the {0}.",
            "Switch {1} the light in the {0}.",
            "Light {1} in the {0}, please.",
            "Turn the {0} light {1}.",
            "Can you switch the {0} light {1}?",
        ),
        ("Can you turn {1} the light in the {0}?", "Please switch the {0} light {1}."),
    ),
    Kind(
        ("convert", "convert_currency", "exchange"),
        "Convert an amount of money.",
        (
            Parameter(("amount", "value"), "integer", _number(1, 5000)),
            Parameter(("from", "source"), "string", _one_of("EUR", "USD", "GBP", "JPY", "CHF", "SEK")),
            Parameter(("to", "target"), "string", _one_of("EUR", "USD", "GBP", "JPY", "CHF", "SEK")),
        ),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Change {0} {1} into {2}.", "{0} {1} in {2}?"),
        ("Can you convert {0} {1} to {2}?", "What is {0} {1} in {2}?"),
    ),
    Kind(
        ("book_table", "reserve_table", "reserve"),
        "Book a table in a restaurant.",
        (
            Parameter(("people", "guests", "seats"), "integer", _number(1, 12)),
            Parameter(("time", "at"), "string", _clock),
        ),
        (
            "Book a table for {0} at {1}.",
            "Reserve a table for {0} people at {1}.",
            "I need a table for {0} at {1}.",
            "Table for {0} at {1}, please.",
            "At {1}, we need a table for {0}.",
            "We come at {1} and need a table for {0} people.",
        ),
        ("Can you book a table for {0} people at {1}?", "We want to eat at {1}, a table for {0}."),
    ),
    Kind(
        ("create_note", "add_note", "write_note"),
        "Save a note.",
        (Parameter(("text", "content", "note"), "string", _phrase),),
        ('Make a note: "{0}"', 'Write down "{0}".', 'Save the note "{0}".', 'Note "{0}".'),
        ('Can you save a note that says "{0}"?', 'Please write down "{0}".'),
    ),
    Kind(
        ("get_user", "find_user", "user_info"),
        "Find a user by number.",
        (Parameter(("id", "user_id", "number"), "integer", _number(1, 9999)),),
        ("Find user {0}.", "Get the user with the number {0}.", "Who is user {0}?", "Show me user {0}."),
        ("Can you find the user with the number {0}?", "Look up user {0}."),
    ),
    Kind(
        ("open_page", "open_app", "open"),
        "Open an app.",
        (Parameter(("app", "name", "page"), "string", _word),),
        ("Open {0}.", "Please open {0}.", "Start the app {0}.", "Show the app {0}."),
        ("Can you open {0} for me?", "I want to use the app {0}, open it."),
    ),
)
