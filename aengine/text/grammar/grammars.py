"""Structured output: compiled grammars, the state of one output within its grammar, and masks of allowed tokens."""

from __future__ import annotations

import asyncio
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from anyio import to_thread
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from aengine.errors import InvalidRequestError
from aengine.structured import Structured
from aengine.text.answer.lark import PLACED
from aengine.text.grammar.source import GrammarLimits, grammar_source
from aengine.text.grammar.threads import CompileThreads
from aengine.text.tokens.tokenizer import Tokenizer

MAX_CACHED = 32
MAX_LEXER_STATES = 50_000  # of one grammar, shared by all that use it: about 30 MB
MAX_FILL_THREADS = 8

_PLACE = re.compile(r"^at (\d+)\(\d+\): ")
_QUOTED_LINE = re.compile(r"^\s*\d+ \| ", re.MULTILINE)


class Matcher:
    """Where one output stands in its grammar. Cheap to make and to copy: the compiled grammar is shared.

    `accept` only notes a token; the next fill takes it into account, off the loop.
    """

    __slots__ = ("_matcher", "_noted", "param", "source")

    def __init__(self, matcher: LLMatcher, source: str, param: str) -> None:
        self._matcher = matcher
        self._noted: list[int] = []
        self.source = source  # of the grammar
        self.param = param  # the request's field that asked for it

    def copy(self) -> Matcher:
        """The same state, from here on independent."""
        twin = Matcher(self._matcher.deep_copy(), self.source, self.param)
        twin._noted = list(self._noted)
        return twin

    def accept(self, token_id: int) -> None:
        """Move on by one token of the output, one that the last mask allowed."""
        self._noted.append(token_id)

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens; ValueError if there are not that many."""
        noted = min(count, len(self._noted))
        del self._noted[len(self._noted) - noted :]
        if count > noted and not self._matcher.rollback(count - noted):
            raise ValueError(f"cannot take back {count} tokens")

    @property
    def stopped(self) -> bool:
        """Whether nothing but the end may follow."""
        self.advance()
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further: a token that it forbids, or too much to compute."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def advance(self) -> LLMatcher:
        """The library's matcher, with all tokens taken in."""
        if self._noted:
            self._matcher.consume_tokens(self._noted)
            self._noted.clear()
        return self._matcher


class Grammars:
    """Compiles grammars for one tokenizer and fills masks. Made off the loop: a vocabulary of 150,000 takes 0.7 s.

    `vocab_size` is the model's: ids without a token are never allowed.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        self.eos_ids = tuple(token_id for token_id in eos_ids if token_id < vocab_size)
        self.words = -(-vocab_size // 32)  # of a mask
        self._limits = limits or GrammarLimits()
        self._answers = tokenizer.answer_format
        self._missing = ""  # what it takes to structure outputs at all
        self._tokenizer: LLTokenizer | None = None
        if not self.eos_ids:
            self._missing = "the checkpoint names no end-of-sequence token, so that no output could end"
        elif tokenizer.pieces is None:
            self._missing = "the text of this checkpoint's tokenizer is not that of its tokens, one after the other"
        else:
            vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, self.eos_ids))
            self._tokenizer = LLTokenizer(vocabulary, eos_token=list(self.eos_ids))
        self._parser_limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._cached: OrderedDict[str, LLMatcher] = OrderedDict()  # by source, the latest used last
        self._compiling = CompileThreads()
        self._executor = LLExecutor(num_threads=max(1, min(MAX_FILL_THREADS, (os.cpu_count() or 1) - 1)))
        self._filling = ThreadPoolExecutor(1, thread_name_prefix="aengine-masks")

    async def matcher(self, structured: Structured) -> Matcher:
        """A matcher at the start of the output.

        Raises `InvalidRequestError`, naming the field and the reason, and `QueueFullError` while too many compile.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise InvalidRequestError(f"{structured.param}: {self._missing}", structured.param)
        # 30 ms for a large schema
        source = await to_thread.run_sync(grammar_source, structured, self._limits, self._answers)
        compiled = self._cached.get(source)
        if compiled is None:
            try:
                compiled = await self._compiling.run(lambda: self._compile(tokenizer, source), self._limits.seconds)
            except TimeoutError:
                raise InvalidRequestError(
                    f"{structured.param}: compiling it takes longer than {self._limits.seconds:g} seconds",
                    structured.param,
                ) from None
            except _RefusedError as error:
                param = error.where or structured.param
                raise InvalidRequestError(f"{param}: {error}", param) from None
            self._cached[source] = compiled
        self._cached.move_to_end(source)
        if len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return Matcher(compiled.deep_copy(), source, structured.param)

    async def fill(self, matchers: Sequence[Matcher | None]) -> NDArray[np.int32]:
        """One mask per matcher, [matchers, words] int32: bit i % 32 of word i // 32 tells whether token i may follow.

        The end-of-sequence tokens may exactly where the output may end. None allows everything. Look at each
        matcher's `error` afterwards: with one, its mask allows nothing but an end that it must not come to.
        """
        loop = asyncio.get_running_loop()
        masks = await loop.run_in_executor(self._filling, self._fill, matchers)
        for matcher in matchers:
            if matcher is not None and matcher.error is not None:
                self._cached.pop(matcher.source, None)  # what it shares with its copies may have become too large
        return masks

    def close(self) -> None:
        """Let go of the threads."""
        self._filling.shutdown()

    def _compile(self, tokenizer: LLTokenizer, source: str) -> LLMatcher:
        """Raises `_RefusedError` with the reason."""
        if (compiled := self._cached.get(source)) is not None:
            return compiled  # while this one waited for its place
        compiled = LLMatcher(tokenizer, source, log_level=0, limits=self._parser_limits)
        trial = compiled.deep_copy()
        trial.compute_bitmask()  # some grammars are too large for their first token already
        for matcher in (compiled, trial):
            if matcher.is_error():
                raise _RefusedError(matcher.get_error())
        return compiled

    def _fill(self, matchers: Sequence[Matcher | None]) -> NDArray[np.int32]:
        masks = np.full((len(matchers), self.words), -1, dtype=np.int32)
        bound = [(matcher.advance(), place) for place, matcher in enumerate(matchers) if matcher is not None]
        if bound:
            self._executor.unsafe_compute_mask_ptr(bound, masks.ctypes.data, masks.strides[0], len(masks))
        return masks


class _Vocabulary:
    """What the library wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_ids[0]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        # These are never text: a marker that could be, would not end the text before it.
        special = tokenizer.special_ids.union(eos_ids, tokenizer.answer_format.markers.values())
        self.special_token_ids = sorted(token_id for token_id in special if token_id < vocab_size)

    def __call__(self, text: bytes) -> list[int]:
        """Refused on purpose: the library tries it once when it is made, and no grammar here needs a text's tokens."""
        raise TypeError("a vocabulary of a grammar does not encode text")


class _RefusedError(ValueError):
    """A grammar that does not compile, in the library's words. where: the line's place in the request, if it tells."""

    def __init__(self, message: str) -> None:
        super().__init__(_reason(message))
        line = _PLACE.match(message)
        quoted = None if line is None else re.search(rf"^ *{line[1]} \| .*$", message, re.MULTILINE)
        placed = None if quoted is None else PLACED.search(quoted[0])
        self.where = None if placed is None else placed[1]


def _reason(message: str) -> str:
    """The library's message without the lines of the grammar that it quotes."""
    quoted = _QUOTED_LINE.search(message)
    reason = message[: quoted.start()] if quoted else message
    return _PLACE.sub("", reason).replace("<non-verbose/>", "").strip()[:500]
