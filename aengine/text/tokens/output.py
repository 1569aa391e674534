"""The text of one output: detokenizes its ids and ends it at its stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from aengine.requests.sampling_params import SamplingParams
from aengine.text.tokens.detokenizer import Detokenizer
from aengine.text.tokens.tokenizer import Tokenizer


class StopMatcher:
    """Passes text on until a stop string is complete.

    The stop string that is complete first wins, and the longest one if the same character completes several. The result
    does not depend on how the text is cut into fragments. Only the longest end of the text that may still become a stop
    string is held back. Time is linear in the text, whatever the stop strings are.
    """

    __slots__ = ("_firsts", "_held", "_include", "_progress", "matched")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._progress = [_Progress(stop) for stop in stops if stop]
        self._firsts = frozenset(stop[0] for stop in stops if stop)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """Return the text that can be shown now; nothing after a stop string has been found."""
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        progress, firsts = self._progress, self._firsts
        longest = len(self._held)  # how many characters of a stop string the text ends with
        for index, character in enumerate(text):
            if not longest and character not in firsts:
                continue
            longest = 0
            for stop in progress:
                matched = stop.step(character)
                if matched == stop.length and (self.matched is None or matched > len(self.matched)):
                    self.matched = stop.text
                if matched > longest:
                    longest = matched
            if self.matched is not None:
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen if self._include else seen[: len(seen) - len(self.matched)]
        seen = self._held + text
        shown = len(seen) - longest
        self._held = seen[shown:]
        return seen[:shown]

    def flush(self) -> str:
        """Return the text that was held back. Call once, after the last fragment."""
        held, self._held = self._held, ""
        return held


class UnstoppedBeginning:
    """Separates the beginning of an output, in which stop strings do not count, from the rest.

    The output has such a beginning if it starts with `begin`, after blanks or not. It lasts up to `end`. If `again`
    follows, after blanks or not, it lasts up to the next `end`, and so on.
    """

    __slots__ = ("_again", "_begin", "_blanks", "_edge", "_end", "_held", "_state")

    def __init__(self, begin: str, end: str, again: str = "") -> None:
        self._begin = begin
        self._end = end
        self._again = again
        self._blanks: list[str] = []  # before any other character
        self._edge = ""  # the text while it may still become `begin`, without blanks before it
        self._held = ""  # text that may become `end`
        self._state: Literal["start", "within", "over"] = "start" if begin else "within"

    def feed(self, text: str) -> tuple[str, str]:
        """Return the new text in which stop strings do not count, and the new text in which they do."""
        unstopped = ""
        while self._state != "over":
            if self._state == "start":
                text, self._edge = self._edge + text, ""
                begun = text.lstrip()
                self._blanks.append(text[: len(text) - len(begun)])
                if begun.startswith(self._begin):
                    unstopped += "".join(self._blanks) + self._begin
                    text = begun[len(self._begin) :]
                    self._state = "within"
                elif self._begin.startswith(begun):
                    self._edge = begun
                    return unstopped, ""
                else:
                    text = "".join(self._blanks) + begun
                    self._state = "over"
                    break
                self._blanks.clear()
            seen, self._held = self._held + text, ""
            at = seen.find(self._end)
            if at < 0:
                places = range(max(0, len(seen) + 1 - len(self._end)), len(seen) + 1)
                shown = next(place for place in places if self._end.startswith(seen[place:]))
                self._held = seen[shown:]
                return unstopped + seen[:shown], ""
            at += len(self._end)
            unstopped, text = unstopped + seen[:at], seen[at:]
            self._begin, self._state = self._again, "start" if self._again else "over"
        return unstopped, text

    def flush(self) -> tuple[str, str]:
        """Return the texts that were held back, once no more text comes."""
        within = self._held if self._state == "within" else ""
        other = "".join(self._blanks) + self._edge if self._state == "start" else ""
        self._held = self._edge = ""
        self._blanks.clear()
        return within, other


class _Progress:
    """The prefix of one stop string that the text ends with, by the algorithm of Knuth, Morris and Pratt.

    The failure table grows only as far as the text has matched, so that a long stop string costs nothing up front.
    """

    __slots__ = ("_failure", "_matched", "length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = len(text)
        self._matched = 0
        self._failure = [0]  # [i]: the length of the longest proper prefix of text[: i + 1] that is also its suffix

    def step(self, character: str) -> int:
        """Feed one character; returns how many characters of the stop string the text ends with.

        The call that completes the stop string must be the last one.
        """
        self._matched = matched = self._extend(self._matched, character)
        if matched > len(self._failure):
            self._failure.append(self._extend(self._failure[-1], character))
        return matched

    def _extend(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._failure[matched - 1]
        return matched + (self.text[matched] == character)


class OutputText:
    """Detokenizes one output and ends it at its stop strings.

    Stop strings count only after the first `min_tokens` tokens and outside `params.unstopped`.
    """

    __slots__ = ("_detokenizer", "_matcher", "_unchecked", "_unstopped", "stop_string")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, prompt_ids, params.shown_special_ids)
        self._matcher = StopMatcher(params.stop, params.include_stop) if params.stop else None
        self._unchecked = params.min_tokens
        self._unstopped = None if params.unstopped is None else UnstoppedBeginning(*params.unstopped)
        self.stop_string: str | None = None  # the one that has ended the text; ids that are fed afterwards add nothing

    def feed(self, token_id: int) -> str:
        """Return the text that can be shown once this id has come, possibly empty."""
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
        text = matcher.feed(text)
        self.stop_string = matcher.matched
        return unstopped + text

    def finish(self) -> str:
        """Return the text that was held back, once no more ids come."""
        text = self._detokenizer.flush()
        matcher = self._matcher
        if matcher is None:
            return text
        unstopped = ""
        if self._unstopped is not None:
            before, text = self._unstopped.feed(text)
            held, rest = self._unstopped.flush()
            unstopped, text = before + held, text + rest
        if self._unchecked > 0:
            return unstopped + text
        text = matcher.feed(text)
        self.stop_string = matcher.matched
        return unstopped + text + matcher.flush()
