"""The state of one output in its grammar, and the cost of its masks."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aengine.errors import AengineError

try:
    from llguidance import LLExecutor as LLExecutor
    from llguidance import LLMatcher as LLMatcher
    from llguidance import LLParserLimits as LLParserLimits
    from llguidance import LLTokenizer as LLTokenizer
    from llguidance import TokenizerWrapper as TokenizerWrapper
except ImportError as error:  # built for another machine or Python, or a linked library is missing
    raise AengineError(f"the grammar library, llguidance, does not work here: {error}") from error


Mask = NDArray[np.int32]

SLOW_SECONDS = 0.005  # CPU time for one mask; about the length of a step, in which masks are filled
SLOW_TOKENS = 16  # after a slow mask, this many masks are expected to be slow

_PLACE = re.compile(r"^at (\d+)\(\d+\): ")
_QUOTED_LINE = re.compile(r"^\s*\d+ \| ", re.MULTILINE)


class Matcher:
    """The state of one output. Matchers are cheap to make and to copy, as they share the compiled grammar.

    `accept` only notes a token; the next fill takes it in, off the loop. A matcher is `late` while its masks are slow
    and the next one is not ready. A step with its output would wait for the mask, and so would all other outputs.
    """

    __slots__ = (
        "_mask",
        "_masks_since_slow",
        "_matcher",
        "_restarted",
        "_start",
        "_taken",
        "_tokens",
        "param",
        "source",
        "working",
    )

    def __init__(self, start: LLMatcher, source: str, param: str, mask: Mask | None = None, slow: bool = False) -> None:
        """Make a matcher at the start of an output.

        Args:
            start: The library's matcher there. It never changes, because all outputs of the grammar share it.
            mask: The first mask, if it is known.
            slow: Whether masks are expected to be slow.
        """
        self._start = start
        self._matcher = start.deep_copy()
        self._tokens: list[int] = []  # of the output
        self._taken = 0  # how many of them `_matcher` has taken in
        self._restarted = False
        self._mask = mask
        self._masks_since_slow = 0 if slow else SLOW_TOKENS  # masks since the last slow one
        self.working: asyncio.Future[Mask] | None = None  # the mask that is being filled while steps run
        self.source = source  # the grammar's text
        self.param = param  # the request's field that asked for the grammar

    def copy(self) -> Matcher:
        """Return an independent copy."""
        twin = Matcher(self._start, self.source, self.param, self._mask, self.slow)
        twin._matcher = self._matcher.deep_copy()
        twin._tokens, twin._taken, twin._restarted = list(self._tokens), self._taken, self._restarted
        return twin

    def accept(self, token_id: int) -> None:
        """Advance by one token of the output. The last mask must have allowed it."""
        self._mask = None
        self._tokens.append(token_id)

    def restart(self) -> None:
        """Forget an error that drafts have caused. The next fill takes the output in again, from its start.

        Some grammars cannot take a draft back, and some drafts lead to masks that take too much to compute. So the
        output gets no drafts any more.
        """
        self._matcher = self._start.deep_copy()
        self._taken = 0
        self._restarted = True

    @property
    def stopped(self) -> bool:
        """Whether only the end may follow."""
        self.advance()
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """The reason why the grammar cannot be followed any further, or None.

        The grammar forbids a token that came, or the next mask takes too much to compute.
        """
        return reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def take_mask(self) -> Mask | None:
        """Return the next mask, [words] int32, and forget it; None if it is not ready.

        The caller passes the token drawn from the mask to `accept`.
        """
        mask, self._mask = self._mask, None
        return mask

    @property
    def slow(self) -> bool:
        """Whether the next mask is expected to take longer than a step may wait."""
        return self._masks_since_slow < SLOW_TOKENS

    @property
    def late(self) -> bool:
        """Whether the output must skip steps until its mask is ready."""
        return self._mask is None and self._masks_since_slow < SLOW_TOKENS

    @property
    def takes_drafts(self) -> bool:
        """Whether masks after drafts can be computed in time."""
        return not self.slow and not self._restarted

    def advance(self) -> LLMatcher:
        """Return the library's matcher after it has taken in all tokens."""
        if self._taken < len(self._tokens):
            self._matcher.consume_tokens(self._tokens[self._taken :])
            self._taken = len(self._tokens)
        return self._matcher

    def fill(self, mask: Mask) -> Mask:
        """Fill and return a mask, [words] int32, in any thread, and measure its cost."""
        begin = time.thread_time()
        self.advance().unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.note_cost(time.thread_time() - begin, 1)
        return mask

    def note_cost(self, seconds: float, masks: int) -> None:
        """Note that computing some masks took this much CPU time."""
        self._masks_since_slow = 0 if seconds > masks * SLOW_SECONDS else self._masks_since_slow + masks

    def filled(self, future: asyncio.Future[Mask]) -> None:
        """Keep the mask that was filled while steps ran. If filling failed, the next step fills the mask."""
        self.working = None
        if future.cancelled() or future.exception() is not None:
            self._masks_since_slow = SLOW_TOKENS
        else:
            self._mask = future.result()


def consume_noted(matchers: Iterable[Matcher], executor: LLExecutor, in_error: LLMatcher) -> None:
    """Advance matchers by their noted tokens, without the interpreter's lock.

    A token of an ambiguous grammar can take a second. The library releases the lock only if it advances two matchers or
    more. So a copy of `in_error`, which ignores tokens, is advanced together with a single matcher.
    """
    while waiting := [matcher for matcher in matchers if matcher._taken < len(matcher._tokens)]:
        steps = [(matcher._matcher, matcher._tokens[matcher._taken]) for matcher in waiting]
        for matcher in waiting:
            matcher._taken += 1
        if len(steps) == 1:
            steps.append((in_error.deep_copy(), 0))
        executor.consume_token_par(steps)


def reason(message: str) -> str:
    """Return the library's message without the lines of the grammar that it quotes."""
    quoted = _QUOTED_LINE.search(message)
    text = message[: quoted.start()] if quoted else message
    return _PLACE.sub("", text).replace("<non-verbose/>", "").strip()[:500]


def line_of(message: str) -> str | None:
    """Return the line of the grammar that the library's message quotes; None if it quotes none."""
    line = _PLACE.match(message)
    quoted = None if line is None else re.search(rf"^ *{line[1]} \| .*$", message, re.MULTILINE)
    return None if quoted is None else quoted[0]
