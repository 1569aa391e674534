"""The families of facts: the facts, the sentence that states one, and the questions for it.

A question is either one of a family's own forms or a general form around a noun phrase ("Tell me {thing}."
with "the capital of France"). Both kinds have forms that only the held-out problems use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench.demo_model.tables_nature import rows

Fact = tuple[str, ...]

ASK = (
    "What is {}?",
    "What's {}?",
    "what is {}",
    "Tell me {}.",
    "Please tell me {}.",
    "Tell me, what is {}?",
    "Name {}.",
    "Please name {}.",
    "Do you know {}?",
    "Do you know what {} is?",
    "Do you happen to know {}?",
    "Can you tell me {}?",
    "Can you tell me what {} is?",
    "Could you tell me {}, please?",
    "Can you name {}?",
    "I want to know {}.",
    "I want to know what {} is.",
    "I would like to know {}.",
    "I need to know {}.",
    "I forgot {}.",
    "I am looking for {}.",
    "I wonder what {} is.",
    "I have to find {}. What is it?",
    "Give me {}.",
    "Give me {}, please.",
    "Find {}.",
    "Say {}.",
    "Write {}.",
    "Show me {}.",
    "Let me know {}.",
    "Remind me, what is {}?",
    "Help me, what is {}?",
    "What would {} be?",
    "{} is what?",
    "{}?",
    "{}",
    "{}, please.",
    "{}, what is it?",
    "My teacher wants to know {}.",
    "My brother does not know {}. Do you?",
    "I never remember {}. Please help.",
    "Do you remember {}?",
    "Again, what is {}?",
    "Help me to find {}, please.",
    "I really need {}.",
    "Please answer this: what is {}?",
    "And {}?",
    "So {} is what?",
    "Someone asked about {}. What should I say?",
)
ASK_UNSEEN = (
    "Would you please tell me what {} is?",
    "I do not remember {}. Can you help me?",
    "My friend asked me about {}. What is it?",
    "So, what is {} again?",
    "I need {}, please.",
    "Please help me find {}.",
    "Answer this for me: {}?",
)
# Around any question, so that a few words before or after it do not matter.
_AROUND = (
    "Hi! {}",
    "Hello, {}",
    "Please answer: {}",
    "Quick question: {}",
    "I have a question. {}",
    "Can you help me? {}",
    "One more: {}",
    "And now: {}",
    "{} Thanks!",
    "{} Thank you.",
    "{} Answer in one sentence.",
    "{} I do not know.",
    "I was at school today. {}",
    "My friend and I had an idea. {}",
    "Look, here is what I remember: nothing. {}",
    "This is for my homework. {}",
    "Okay. {}",
    "Well, {}",
    "Say, {}",
    "Sorry, one more time: {}",
    "{} Please tell me.",
    "{} It is for a friend.",
    "Hey. {} I need it again.",
    "Answer the question.\n{}",
    "Question: {}",
)


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one kind. Every text is a format over a fact's fields."""

    name: str
    facts: tuple[Fact, ...]
    answer: str
    things: tuple[str, ...]  # noun phrases for the general forms
    questions: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()  # used by held-out problems only
    statements: tuple[str, ...] = ()  # other sentences that say the same
    more: str = ""  # follows the answer in running text


def facts_of(table: str) -> tuple[Fact, ...]:
    """The rows of a table."""
    return tuple(tuple(row) for row in rows(table))


def facts_with_article(table: str) -> tuple[Fact, ...]:
    """The rows, with "a cat" for the noun in field 0 and the bare noun at the end."""
    return tuple((f"{'an' if row[0][0] in 'aeiou' else 'a'} {row[0]}", *row[1:], row[0]) for row in rows(table))


def sentence(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def answer_to(family: Family, fact: Fact) -> str:
    """The one sentence that answers every question about the fact."""
    return sentence(family.answer.format(*fact))


def _polish(question: str, rng: Random, *, lower: bool) -> str:
    """Vary punctuation, surroundings and (if it has no meaning) case, as people do."""
    question = sentence(question)
    if lower and rng.random() < 0.05:
        question = question.lower()
    if rng.random() < 0.25:
        question = rng.choice(_AROUND).format(question)
    if rng.random() < 0.08:
        question = question[:1].lower() + question[1:]
    if rng.random() < 0.08:
        question = question.rstrip("?.")
    return question


def trained_question(family: Family, fact: Fact, rng: Random) -> str:
    """Ask for the fact in one of the trained forms."""
    lower = family.name not in ("elements by symbol", "letters")
    if family.questions and rng.random() < 0.35:
        return _polish(rng.choice(family.questions).format(*fact), rng, lower=lower)
    return _polish(rng.choice(ASK).format(rng.choice(family.things).format(*fact)), rng, lower=lower)


def unseen_question(family: Family, fact: Fact, rng: Random) -> str:
    """Ask for the fact in one of the forms that training never shows."""
    if family.unseen and rng.random() < 0.5:
        return sentence(rng.choice(family.unseen).format(*fact))
    return sentence(rng.choice(ASK_UNSEEN).format(rng.choice(family.things).format(*fact)))


def running_text(family: Family, fact: Fact, rng: Random) -> str:
    """The fact without a chat around it: mostly the answer's sentence and what follows it."""
    roll = rng.random()
    if roll < 0.6 or (roll < 0.75 and not family.statements):
        return answer_to(family, fact) + (" " + sentence(family.more.format(*fact)) if family.more else "")
    if roll < 0.75:
        return sentence(rng.choice(family.statements).format(*fact))
    style: Callable[[str, str], str] = rng.choice(
        (
            lambda q, a: f"Q: {q}\nA: {a}",
            lambda q, a: f"Question: {q}\nAnswer: {a}",
            lambda q, a: f"{q}\n{a}",
        )
    )
    return style(sentence(trained_question(family, fact, rng)), answer_to(family, fact))
