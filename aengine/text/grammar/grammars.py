"""Compiles grammars for structured output, and fills masks of allowed tokens."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from anyio import to_thread

from aengine.errors import AengineError, InvalidRequestError
from aengine.requests.structured import Structured
from aengine.text.answer.lark import PLACED
from aengine.text.grammar.drafted import DraftedOutput, Masks, fill_together
from aengine.text.grammar.matcher import (
    SLOW_SECONDS,
    LLExecutor,
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    Mask,
    TokenizerWrapper,
    consume_noted,
    line_of,
    reason,
)
from aengine.text.grammar.matcher import Matcher as Matcher
from aengine.text.grammar.source import GrammarLimits, grammar_source
from aengine.text.grammar.threads import CompileThreads, lower_priority
from aengine.text.tokens.tokenizer import Tokenizer

T = TypeVar("T")

MAX_CACHED = 32
MAX_LEXER_STATES = 50_000  # of one grammar, shared by all its users: about 30 MB
MAX_FILL_THREADS = 8
MEASURE_EVERY = 64  # fills without measuring after each mask was measured and none was slow


def check_library() -> None:
    """Compile a grammar of one byte, in milliseconds. Raises `AengineError` if the installed library fails."""
    try:
        matcher = LLMatcher(LLTokenizer("byte"), 'start: "a"', log_level=0)
        if matcher.is_error():
            raise RuntimeError(matcher.get_error())
    except Exception as error:
        raise AengineError(f"the grammar library, llguidance, does not work here: {error}") from error


class _CompiledGrammar(NamedTuple):
    """A grammar at its start, with its first mask."""

    matcher: LLMatcher
    mask: Mask
    slow: bool


class Grammars:
    """Compiles grammars for one tokenizer and fills masks.

    Construct it in a worker thread: a vocabulary of 150,000 takes 0.7 s. vocab_size: the model's. Ids without a token
    are never allowed.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        self.eos_ids = tuple(token_id for token_id in eos_ids if token_id < vocab_size)
        self._vocab_size = vocab_size
        self.words = -(-vocab_size // 32)  # words of a mask
        self._limits = limits or GrammarLimits()
        self._answers = tokenizer.answer_format
        self._missing = ""  # the reason why outputs cannot be structured; empty if they can
        self._tokenizer: LLTokenizer | None = None
        if not self.eos_ids:
            self._missing = "the checkpoint names no end-of-sequence token, so that no output could end"
        elif tokenizer.pieces is None:
            self._missing = "this checkpoint's tokenizer does not decode tokens one by one"
        else:
            vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, self.eos_ids))
            self._tokenizer = LLTokenizer(vocabulary, eos_token=list(self.eos_ids))
            self._in_error = LLMatcher(self._tokenizer, "", log_level=0)  # ignores tokens; see consume_noted()
        self._parser_limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._cached: OrderedDict[str, _CompiledGrammar] = OrderedDict()  # by source, the most recently used last
        self._compiling = CompileThreads()
        threads = max(1, min(MAX_FILL_THREADS, (os.cpu_count() or 1) - 1))
        self._executor = LLExecutor(num_threads=threads)
        self._filling = ThreadPoolExecutor(1, thread_name_prefix="aengine-masks")
        self._measuring = ThreadPoolExecutor(threads, thread_name_prefix="aengine-mask")
        self._fills = MEASURE_EVERY  # fills since the last one in which each mask was measured
        self._measures = False  # whether the next fill measures each mask
        self._slow_fills = ThreadPoolExecutor(
            max(1, threads // 4), thread_name_prefix="aengine-slow-masks", initializer=lower_priority
        )
        # The executor's threads inherit the low priority of the thread that makes it.
        self._slow_executor = self._slow_fills.submit(LLExecutor, num_threads=max(1, threads // 4)).result()

    async def matcher(self, structured: Structured) -> Matcher:
        """Return a matcher at the start of the output.

        Raises `InvalidRequestError`, naming the field and the reason, and `QueueFullError` while too many grammars
        compile.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise InvalidRequestError(f"{structured.param}: {self._missing}", structured.param)
        # A large schema takes 30 ms.
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
        return Matcher(compiled.matcher, source, structured.param, compiled.mask, compiled.slow)

    async def fill(self, matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]] | None = None) -> Masks:
        """Return the masks of all matchers, each followed by those after its drafts.

        The end-of-sequence tokens are allowed exactly when the output may end. A matcher of None allows everything.
        Check each matcher's `error` afterwards. If it has one, do not use its mask, which allows only the end.

        drafts: those of each matcher. None: there are none.
        """
        working = [matcher.working for matcher in matchers if matcher is not None and matcher.working is not None]
        if working:
            await asyncio.wait(working)
        loop = asyncio.get_running_loop()
        masks = await loop.run_in_executor(self._filling, self._fill, matchers, drafts or [()] * len(matchers))
        for matcher in matchers:
            if matcher is None:
                continue
            if matcher.error is not None:
                self._cached.pop(matcher.source, None)  # the state that it shares with its copies may be too large
            elif matcher.slow and (compiled := self._cached.get(matcher.source)) is not None and not compiled.slow:
                # The next output with this grammar then starts as slow.
                self._cached[matcher.source] = compiled._replace(slow=True)
        return masks

    def prepare(self, matcher: Matcher, done: Callable[[], None]) -> None:
        """Fill the next mask of a late matcher while steps run. Calls `done` when the mask is ready."""
        if not matcher.late or matcher.working is not None:
            return
        loop = asyncio.get_running_loop()
        matcher.working = loop.run_in_executor(self._slow_fills, self._fill_slowly, matcher)

        def filled(future: asyncio.Future[Mask]) -> None:
            matcher.filled(future)
            done()

        matcher.working.add_done_callback(filled)

    def close(self) -> None:
        """Shut the threads down."""
        self._filling.shutdown()
        self._measuring.shutdown()
        self._slow_fills.shutdown(wait=False, cancel_futures=True)

    def _compile(self, tokenizer: LLTokenizer, source: str) -> _CompiledGrammar:
        """Compile a grammar. Raises `_RefusedError` with the reason."""
        if (known := self._cached.get(source)) is not None:
            return known  # another call compiled it while this one waited
        compiled = LLMatcher(tokenizer, source, log_level=0, limits=self._parser_limits)
        mask = np.empty(self.words, dtype=np.int32)
        # Some grammars exceed a limit at their first token. The first trial also builds the lexer, so only the second
        # one shows whether masks are slow.
        trials = [Matcher(compiled, source, "") for _ in range(2)]
        for trial in trials:
            trial.fill(mask)
            for matcher in (compiled, trial.advance()):
                if matcher.is_error():
                    raise _RefusedError(matcher.get_error())
        return _CompiledGrammar(compiled, mask, trials[1].slow)

    def _fill_slowly(self, matcher: Matcher) -> Mask:
        consume_noted([matcher], self._slow_executor, self._in_error)
        return matcher.fill(np.empty(self.words, dtype=np.int32))

    def _fill(self, matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]]) -> Masks:
        masks = Masks.allowing_all(drafts, self.words)
        empty: list[tuple[int, Matcher]] = []
        drafted: list[DraftedOutput] = []
        place = 0
        for index, (matcher, own) in enumerate(zip(matchers, drafts, strict=True)):
            if matcher is not None:
                if (mask := matcher.take_mask()) is None:
                    empty.append((place, matcher))
                else:
                    masks.bits[place] = mask
                if usual := list(itertools.takewhile(self._is_usual, own)):
                    drafted.append(DraftedOutput(matcher, index, place, usual))
            place += 1 + len(own)
        begin = time.monotonic()
        measures = self._measures and len(empty) > 1
        self._fill_first(empty, masks.bits, measures)
        begun = [output for output in drafted if output.matcher.takes_drafts and output.may_begin(masks.bits)]
        self._fill_after_drafts(begun, masks, measures)
        if measures:
            self._measures = False
            self._fills = MEASURE_EVERY if any(matcher.slow for _, matcher in empty) else 0
        elif len(empty) > 1:
            self._fills += 1
            self._measures = self._fills >= MEASURE_EVERY and time.monotonic() - begin > SLOW_SECONDS
        return masks

    def _is_usual(self, token_id: int) -> bool:
        """Return whether a mask after this draft may be needed: it is a token, and does not end the output."""
        return 0 <= token_id < self._vocab_size and token_id not in self.eos_ids

    def _fill_first(self, empty: Sequence[tuple[int, Matcher]], bits: Mask, measures: bool) -> None:
        """Fill the masks at the given places, after all tokens of their outputs."""
        if empty:
            consume_noted([matcher for _, matcher in empty], self._executor, self._in_error)
        if len(empty) == 1 or measures:
            self._each(lambda one: one[1].fill(bits[one[0]]), empty)
        elif empty:
            calls = [(matcher.advance(), place) for place, matcher in empty]
            self._executor.unsafe_compute_mask_ptr(calls, bits.ctypes.data, bits.strides[0], len(bits))

    def _fill_after_drafts(self, outputs: Sequence[DraftedOutput], masks: Masks, measures: bool) -> None:
        """Fill the masks after drafts, and note how many drafts of each output are usable."""
        if len(outputs) == 1 or measures:
            self._each(lambda output: output.fill(masks, self._executor), outputs)
        elif outputs:
            fill_together(outputs, masks.bits, self._executor)
            for output in outputs:
                output.settle(masks)

    def _each(self, work: Callable[[T], object], items: Sequence[T]) -> None:
        """Call `work` with each item: one in this thread, several in the threads that measure masks."""
        run = map if len(items) == 1 else self._measuring.map
        list(run(work, items))


class _Vocabulary:
    """A tokenizer's vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_ids[0]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        # These tokens are never text. A marker that could be text would not end the text before it.
        special = tokenizer.special_ids.union(eos_ids, tokenizer.answer_format.markers.values())
        self.special_token_ids = sorted(token_id for token_id in special if token_id < vocab_size)

    def __call__(self, text: bytes) -> list[int]:
        """Raise TypeError. The library tries to encode once when it reads the vocabulary; no grammar here needs it."""
        raise TypeError("a vocabulary of a grammar does not encode text")


class _RefusedError(ValueError):
    """The compiler refused a grammar. where: the place in the request, if the library's message shows it."""

    def __init__(self, message: str) -> None:
        super().__init__(reason(message))
        line = line_of(message)
        placed = None if line is None else PLACED.search(line)
        self.where = None if placed is None else placed[1]
