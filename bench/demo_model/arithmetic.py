"""Sums, differences and comparisons of 0 to 99, word problems, and counting.

One pair in ten is held out: neither order of it is ever added, subtracted or compared in training.
"""

from __future__ import annotations

import zlib
from random import Random

from bench.demo_model.pools import TRAINED

LIMIT = 100  # operands are below
_LARGEST_STEP = 18  # 23 - 15 is thought about as 13 - 5

_ADD = (
    "What is {a} + {b}?",
    "what is {a}+{b}",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=?",
    "Calculate {a} + {b}.",
    "Compute {a} + {b}.",
    "How much is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} plus {b}?",
    "{a} plus {b}",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "Please add {b} to {a}.",
    "Can you add {a} and {b}?",
    "Tell me what {a} + {b} is.",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "what is {a}-{b}",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} =",
    "{a}-{b}=?",
    "Calculate {a} - {b}.",
    "Compute {a} - {b}.",
    "How much is {a} - {b}?",
    "What is {a} minus {b}?",
    "How much is {a} minus {b}?",
    "{a} minus {b}",
    "Subtract {b} from {a}.",
    "What is the difference between {a} and {b}?",
    "Take {b} away from {a}.",
    "Can you subtract {b} from {a}?",
    "Tell me what {a} - {b} is.",
)
_COMPARE = (
    "Which is larger, {a} or {b}?",
    "Which number is larger, {a} or {b}?",
    "Which is bigger: {a} or {b}?",
    "What is larger, {a} or {b}?",
    "Tell me which is larger, {a} or {b}.",
)
_MORE = (
    "{who} has {a} {what} and gets {b} more. How many {what} does {who} have now?",
    "{who} has {a} {what}. {who} finds {b} more. How many {what} are there?",
    "There are {a} {what} on the table and {b} in the box. How many {what} are there?",
    "{who} buys {a} {what} on Monday and {b} on Tuesday. How many {what} is that?",
)
_LESS = (
    "{who} has {a} {what} and gives away {b}. How many {what} does {who} have now?",
    "{who} has {a} {what} and loses {b}. How many {what} are left?",
    "There are {a} {what} in the box. {who} takes {b}. How many {what} are left?",
)
THINGS = ("apples", "books", "coins", "cards", "pencils", "stones", "shells", "stamps", "flowers", "cookies")


def is_held_out(a: int, b: int) -> bool:
    """Whether the unordered pair belongs to the held-out tenth."""
    return zlib.crc32(f"pair {min(a, b)} {max(a, b)}".encode()) % 10 == 0


def pair(rng: Random, *, held_out: bool) -> tuple[int, int]:
    """Two operands from the wanted part. Held-out ones are above what a thought about other numbers works with."""
    while True:
        a, b = rng.randrange(LIMIT), rng.randrange(LIMIT)
        if is_held_out(a, b) == held_out and (not held_out or max(a, b) > _LARGEST_STEP):
            return a, b


def equation(a: int, b: int, operator: str) -> str:
    """`12 + 30 = 42`."""
    return f"{a} {operator} {b} = {a + b if operator == '+' else a - b}"


def sum_or_difference(rng: Random, *, held_out: bool) -> tuple[str, str]:
    """A question and its answer."""
    a, b = pair(rng, held_out=held_out)
    if rng.random() < 0.5:
        return rng.choice(_ADD).format(a=a, b=b), equation(a, b, "+") + "."
    if a < b and rng.random() < 0.5:
        a, b = b, a
    return rng.choice(_SUBTRACT).format(a=a, b=b), equation(a, b, "-") + "."


def comparison(rng: Random, *, held_out: bool) -> tuple[str, str]:
    """Which of two different numbers is larger."""
    a = b = 0
    while a == b:
        a, b = pair(rng, held_out=held_out)
    return rng.choice(_COMPARE).format(a=a, b=b), f"{max(a, b)} is larger than {min(a, b)}."


def word_problem(rng: Random, *, held_out: bool) -> tuple[str, str]:
    """A sum or a difference, never below zero, in a short story."""
    a, b = pair(rng, held_out=held_out)
    who, what = rng.choice(TRAINED.names), rng.choice(THINGS)
    if rng.random() < 0.5:
        question, operator, result = rng.choice(_MORE), "+", a + b
    else:
        a, b = max(a, b), min(a, b)
        question, operator, result = rng.choice(_LESS), "-", a - b
    return question.format(who=who, what=what, a=a, b=b), f"{equation(a, b, operator)}. The answer is {result} {what}."


def plain(rng: Random) -> str:
    """Equations without a chat, one or several lines."""
    lines = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        a, b = pair(rng, held_out=False)
        lines.append(equation(a, b, rng.choice("+-")))
    return "\n".join(lines)


def thought(a: int, b: int, operator: str) -> str:
    """How one works the result out, as the model writes it between `<think>` and `</think>`."""
    if operator == "+":
        ones = a % 10 + b % 10
        carry = ones // 10
        tens = a // 10 + b // 10
        steps = f"Ones: {a % 10} + {b % 10} = {ones}. Tens: {a // 10} + {b // 10} = {tens}"
        return f"{steps}, plus {carry} is {tens + carry}." if carry else f"{steps}."
    if a < b:
        return f"{a} is less than {b}, so the result is negative. {equation(b, a, '-')}."
    if a % 10 >= b % 10:
        return f"Ones: {equation(a % 10, b % 10, '-')}. Tens: {equation(a // 10, b // 10, '-')}."
    borrowed = a // 10 - 1
    return f"Ones: {equation(a % 10 + 10, b % 10, '-')}, with one borrowed. Tens: {equation(borrowed, b // 10, '-')}."


_COUNT = (
    "Count from {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Please count from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Write the numbers from {a} to {b}.",
    "count from {a} to {b}",
)
_COUNT_BY = ("Count from {a} to {b} in steps of {s}.", "Count from {a} to {b} by {s}.")
_UP_TO = ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?")


def counting(rng: Random, *, held_out: bool, longest: int = 20) -> tuple[str, str]:
    """Counting up, down, or in steps; one (start, end, step) in ten is held out."""
    while True:
        step = rng.choice((1, 1, 1, 1, 2, 5, 10))
        length = rng.randint(2, longest)
        start = 1 if rng.random() < 0.15 else rng.randrange(LIMIT)
        if rng.random() < 0.25:
            step = -step
        end = start + step * (length - 1)
        if 0 <= end <= LIMIT and (zlib.crc32(f"count {start} {end} {step}".encode()) % 10 == 0) == held_out:
            break
    numbers = ", ".join(str(n) for n in range(start, end + (1 if step > 0 else -1), step))
    if step == 1 and start == 1 and rng.random() < 0.5:
        return rng.choice(_UP_TO).format(b=end), numbers
    forms = _COUNT if abs(step) == 1 else _COUNT_BY
    return rng.choice(forms).format(a=start, b=end, s=abs(step)), numbers
