"""The text of one output: its ids detokenized, up to its stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from aengine.requests.sampling_params import SamplingParams
from aengine.text.tokens.detokenizer import Detokenizer
from aengine.text.tokens.stop import StopMatcher, UnstoppedBeginning
from aengine.text.tokens.tokenizer import Tokenizer


class OutputText:
    """Detokenizes one output, and ends it at its stop strings.

    Stop strings are looked for only in the text that follows the first `min_tokens` tokens, and `params.unstopped`.
    """

    __slots__ = ("_detokenizer", "_matcher", "_unchecked", "_unstopped")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, prompt_ids, params.shown_special_ids)
        self._matcher = StopMatcher(params.stop, params.include_stop) if params.stop else None
        self._unchecked = params.min_tokens
        self._unstopped = None if params.unstopped is None else UnstoppedBeginning(*params.unstopped)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text; everything fed after that adds nothing."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text, if one has."""
        return None if self._matcher is None else self._matcher.matched

    def feed(self, token_id: int) -> str:
        """The text that may be shown now that this id has come, possibly empty."""
        text = self._detokenizer.feed(token_id)
        matcher = self._matcher
        if matcher is None:
            return text
        unstopped = ""
        if self._unstopped is not None:
            unstopped, text = self._unstopped.feed(text)
        if self._unchecked > 0:
            self._unchecked -= 1
            return unstopped + text
        return unstopped + matcher.feed(text)

    def finish(self) -> str:
        """The text that was held back, once no further id will come."""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        unstopped = ""
        if self._unstopped is not None:
            before, text = self._unstopped.feed(text)
            held, rest = self._unstopped.flush()
            unstopped, text = before + held, text + rest
        if self._unchecked > 0:
            return unstopped + text
        return unstopped + self._matcher.feed(text) + self._matcher.flush()
