"""Whole documents of the training stream: chats of one or many turns, with tools, with thoughts, and plain text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from random import Random

from bench.demo_model import arithmetic, echo, objects, small_talk, stories, tool_kinds, tools
from bench.demo_model.chat_format import END_OF_TURN, Message, assistant, render, system, user
from bench.demo_model.facts import Family, answer_to, running_text, trained_question
from bench.demo_model.families import FAMILIES
from bench.demo_model.pools import TRAINED, Pool

_BY_NAME = {family.name: family for family in FAMILIES}
_FAMILY_WEIGHTS = [len(family.facts) ** 0.6 for family in FAMILIES]
_PLAIN_TOOL_FAMILIES = tuple(_BY_NAME[name] for name in ("capitals", "colours", "opposites", "legs", "continents"))
_FOLLOWED = tuple(
    _BY_NAME[name]
    for name in (
        "capitals",
        "continents",
        "languages",
        "currencies",
        "colours",
        "legs",
        "opposites",
        "chemical symbols",
    )
)
_FOLLOW = ("And {0}?", "What about {0}?", "And what about {0}?", "and {0}", "Now {0}, please.")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
_TWO_PLACES = (
    "What is the {1} in {0[0]} and in {0[1]}?",
    "Tell me the {1} in {0[0]} and {0[1]}.",
    "{1} in {0[0]} and {0[1]}?",
)


def close(
    messages: Sequence[Message], answer: str, *, specs: Sequence[dict[str, object]] = (), thinking: bool = False
) -> str:
    """The chat with the answer that the model is to give, to the end of its turn."""
    prompt = render(messages, tools=specs, thinking=thinking, add_generation_prompt=True)
    return f"{prompt}{answer}{END_OF_TURN}\n"


def pick_fact(rng: Random) -> tuple[Family, tuple[str, ...]]:
    """A fact; large families come up more often than small ones, but less than in proportion."""
    family = rng.choices(FAMILIES, _FAMILY_WEIGHTS)[0]
    return family, rng.choice(family.facts)


def fact_turn(rng: Random) -> tuple[str, str]:
    """A trained question about a fact, and its answer."""
    family, fact = pick_fact(rng)
    return trained_question(family, fact, rng), answer_to(family, fact)


def turn(rng: Random, longest_count: int = 20) -> tuple[str, str]:
    """One exchange of any kind that needs neither tools nor thoughts."""
    roll = rng.random()
    if roll < 0.46:
        return fact_turn(rng)
    if roll < 0.55:
        question, answer = arithmetic.sum_or_difference(rng, held_out=False)
        return (f"Hi! {question}" if rng.random() < 0.05 else question), answer
    if roll < 0.57:
        return arithmetic.comparison(rng, held_out=False)
    if roll < 0.60:
        return arithmetic.word_problem(rng, held_out=False)
    if roll < 0.64:
        return arithmetic.counting(rng, held_out=False, longest=longest_count)
    if roll < 0.85:
        return objects.request(rng, held_out=False)
    if roll < 0.90:
        return echo.request(rng, held_out=False)
    if roll < 0.91:
        return stories.request(rng)
    return small_talk.exchange(rng)


def _opening(rng: Random) -> list[Message]:
    return [system(small_talk.system_message(rng))] if rng.random() < 0.2 else []


def follow_up(rng: Random) -> list[tuple[str, str]]:
    """A question about a fact, then a short question about another fact of the same kind."""
    family = rng.choice(_FOLLOWED)
    first, second = rng.sample(family.facts, 2)
    short = rng.choice(_FOLLOW).format(*second)
    return [(trained_question(family, first, rng), answer_to(family, first)), (short, answer_to(family, second))]


def chat(rng: Random, turns: int) -> str:
    """A chat of the given number of turns. Sometimes the user gives a name and later asks for it."""
    messages = _opening(rng)
    exchanges = [turn(rng, 101 if turns > 2 else 20) for _ in range(turns)]
    if turns > 1 and rng.random() < 0.15:
        exchanges += follow_up(rng)
    if turns > 1 and rng.random() < 0.15:
        said, answer, asked, recalled = small_talk.introduction(rng)
        exchanges.insert(0, (said, answer))
        exchanges.insert(rng.randint(1, len(exchanges)), (asked, recalled))
    for question, answer in exchanges[:-1]:
        messages += [user(question), assistant(answer)]
    question, answer = exchanges[-1]
    return close([*messages, user(question)], answer)


def thoughtful_turn(rng: Random, *, held_out: bool) -> tuple[str, str, str]:
    """A question, the thought before its answer, and the answer."""
    roll = rng.random()
    if roll < 0.6 or held_out:
        operator = rng.choice("+-")
        a, b = arithmetic.pair(rng, held_out=held_out)
        word = {"+": "plus", "-": "minus"}[operator]
        question = rng.choice(
            ("What is {a} {o} {b}?", "{a} {o} {b}", "Calculate {a} {o} {b}.", "How much is {a} {w} {b}?")
        )
        thought = arithmetic.thought(a, b, operator)
        return question.format(a=a, b=b, o=operator, w=word), thought, arithmetic.equation(a, b, operator) + "."
    if roll < 0.75:
        question, answer = arithmetic.comparison(rng, held_out=False)
        return question, f"I compare the two numbers. {answer}", answer
    if roll < 0.93:
        family, fact = pick_fact(rng)
        answer = answer_to(family, fact)
        return trained_question(family, fact, rng), f"I remember: {answer}", answer
    question, answer = small_talk.exchange(rng)
    return question, "I can answer this at once.", answer


def thoughtful_answer(thought: str, answer: str) -> str:
    """How the model writes both."""
    return f"<think>\n{thought}\n</think>\n\n{answer}"


def thinking_chat(rng: Random) -> str:
    """A chat whose last answer has its thought; earlier ones have lost theirs, as the template does it."""
    messages = _opening(rng)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        question, _, answer = thoughtful_turn(rng, held_out=False)
        messages += [user(question), assistant(answer)]
    question, thought, answer = thoughtful_turn(rng, held_out=False)
    return close([*messages, user(question)], thoughtful_answer(thought, answer), thinking=True)


def _tool_message(calls: Sequence[tools.Call]) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": c.tool.name, "arguments": c.arguments}} for c in calls
        ],
    }


def tool_turn(
    rng: Random, tool: tools.Tool, pool: Pool, *, held_out: bool, unseen_form: bool = False
) -> tuple[str, list[tools.Call]]:
    """A request that the tool serves, and the calls that serve it: one, or two for two places."""
    kind = tool.kind
    call = tools.make_call(rng, tool, pool, held_out=held_out)
    topic = {"get_weather": "weather", "get_time": "time"}.get(kind.names[0])
    if topic and not held_out and rng.random() < 0.15:
        calls = [call, tools.make_call(rng, tool, pool, held_out=False)]
        form = rng.choice(_TWO_PLACES)
        return form.format([c.values[0] for c in calls], topic), calls
    return call.request(rng.choice(kind.unseen)) if unseen_form else tools.trained_request(rng, call), [call]


def _results(rng: Random, calls: Sequence[tools.Call]) -> tuple[list[Message], str]:
    """What the tools answer, and what the model makes of it."""
    messages: list[Message] = []
    replies = []
    for call in calls:
        words: dict[str, object] = {"t": rng.randint(-9, 40), "sky": rng.choice(_SKIES)}
        words["clock"] = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
        numbers = [value for value in call.values if isinstance(value, int)]
        words |= {"sum": sum(numbers), "product": math.prod(numbers)}
        kind = call.tool.kind
        content = kind.result.format(**words) if kind.result else json.dumps({"ok": True})
        messages.append({"role": "tool", "content": content})
        replies.append(kind.reply.format(*call.values, **words))
    return messages, " ".join(replies if calls[0].tool.kind.result else replies[:1])


def tool_chat(rng: Random) -> str:
    """A chat with tools: calls, results and replies, and now and then a question that needs no tool."""
    wanted = rng.choice(tool_kinds.KINDS)
    tool, offered = tools.make_tools(rng, wanted)
    messages = _opening(rng)
    thinking = rng.random() < 0.06
    turns = rng.choice((1, 1, 1, 1, 2, 3))
    for number in range(turns):
        last = number == turns - 1
        if rng.random() < 0.15:
            question, answer = _without_tool(rng)
            messages.append(user(question))
            thought = "I need no tool for this."
        else:
            request, calls = tool_turn(rng, rng.choice([tool, *offered]), TRAINED, held_out=False)
            messages.append(user(request))
            answer = "\n".join(call.text for call in calls)
            thought = f"I call {calls[0].tool.name}."
            if not last or rng.random() < 0.3:
                results, reply = _results(rng, calls)
                messages += [_tool_message(calls), *results]
                answer, thought = reply, "The tool has answered."
        if not last:
            messages.append(assistant(answer))
    if thinking:
        answer = thoughtful_answer(thought, answer)
    return close(messages, answer, specs=[t.spec for t in offered], thinking=thinking)


def tool_history(rng: Random, offered: Sequence[tools.Tool], turns: int) -> list[Message]:
    """Earlier turns of a chat with these tools: requests, calls, results and replies."""
    messages: list[Message] = []
    for _ in range(turns):
        request, calls = tool_turn(rng, rng.choice(offered), TRAINED, held_out=False)
        results, reply = _results(rng, calls)
        messages += [user(request), _tool_message(calls), *results, assistant(reply)]
    return messages


def _without_tool(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        return small_talk.exchange(rng)
    family = rng.choice(_PLAIN_TOOL_FAMILIES)
    fact = rng.choice(family.facts)
    return trained_question(family, fact, rng), answer_to(family, fact)


def plain(rng: Random) -> str:
    """Text without a chat around it."""
    roll = rng.random()
    if roll < 0.74:
        return running_text(*pick_fact(rng), rng)
    if roll < 0.93:
        return arithmetic.plain(rng)
    if roll < 0.96:
        return stories.story(rng)
    return arithmetic.counting(rng, held_out=False)[1]


def short_document(rng: Random) -> str:
    """A document of mostly less than a hundred tokens."""
    roll = rng.random()
    if roll < 0.52:
        return chat(rng, 1)
    if roll < 0.65:
        return chat(rng, 2)
    if roll < 0.72:
        return chat(rng, 3)
    if roll < 0.90:
        return plain(rng)
    return thinking_chat(rng)


def long_document(rng: Random) -> str:
    """A chat with tools, a chat of many turns, a story, or a short document."""
    roll = rng.random()
    if roll < 0.60:
        return tool_chat(rng)
    if roll < 0.77:
        return chat(rng, rng.choice((3, 3, 4, 5, 6, 8, 12, 16, 24)))
    if roll < 0.80:
        return close([*_opening(rng), user((said := stories.request(rng))[0])], said[1])
    return short_document(rng)
