"""A checkpoint's tokenizer: encodes texts and chats, decodes ids."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, Unpack

import anyio
import msgspec
from anyio import to_thread
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from aengine.errors import AengineError, CheckpointError, ContextLengthError, InvalidRequestError
from aengine.text.answer.formats.table import call_format_in
from aengine.text.answer.parser import ChatPrompt, answer_format_of
from aengine.text.template.control_tokens import ControlTokens, characters
from aengine.text.template.messages import TemplateOptions
from aengine.text.template.rendering import ChatTemplates
from aengine.text.tokens.backend import apply_settings, library_errors, quoting_backend, read_backend
from aengine.text.tokens.bounds import MAX_OUTPUT, is_quick, largest_growth, minimum_tokens
from aengine.text.tokens.pieces import PieceTable
from aengine.text.tokens.settings import (
    NAMED_TOKENS,
    AddedTokenInfo,
    TokenizerInfo,
    TokenizerSettings,
    read_settings,
    read_text,
    refuse_without_json,
)
from aengine.text.tokens.vocabulary import Vocabulary

INLINE_CHARACTERS = 2000  # about 0.5 ms; a thread costs 0.1 ms and its share of the loop's time
MAX_CHARACTERS = 2**21  # a list of that many ids holds the GIL for about 50 ms, in any thread
MAX_SECONDS = 30.0  # the limit for a text if the tokenizer has unknown patterns
MAX_TOKEN_ID = 2**24 - 1
_MAX_ADDED_TOKENS = 2**16  # twice the most in use, by speech models
_MARKER_TOKENS = 16  # the most tokens of a marker and the blanks after it
_RENDERINGS = 4  # threads; a slow rendering may occupy one for seconds
_LONG_CHARACTERS = 2**16  # about 30 ms
_MEDIUM_TEXTS, _LONG_TEXTS = 2, 1  # threads; a long text never delays a shorter one
_LONG_RENDERINGS = 1  # threads for chats of that many characters

T = TypeVar("T")
Text = str | tuple[str, str]  # two texts are joined as the checkpoint defines it


def warm_up_library() -> None:
    """Use the tokenizers library once in this thread, which takes 1 ms.

    It allocates the library's thread-local variables. If the first use came later, it would wait for any `dlopen` that
    another thread is making, because glibc guards both by one lock.
    """
    Backend.from_str(Backend(BPE()).to_str()).encode_batch_fast(["a"])


class Tokenizer:
    """A tokenizer with its chat templates. It never changes after `load`, so that any thread may use it."""

    def __init__(
        self, backend: Backend, settings: TokenizerSettings, where: str, embedded: int = MAX_TOKEN_ID + 1
    ) -> None:
        """embedded: the number of ids for which the model has embeddings. Answers contain no other ids."""
        self._backend = backend
        self._settings = settings
        self._renderings = anyio.CapacityLimiter(_RENDERINGS)
        self._long_renderings = anyio.CapacityLimiter(_LONG_RENDERINGS)
        self._medium = anyio.CapacityLimiter(_MEDIUM_TEXTS)
        self._long = anyio.CapacityLimiter(_LONG_TEXTS)
        self.is_quick = is_quick(backend)  # whether short texts may be tokenized on the event loop
        self._most_characters = min(MAX_CHARACTERS, int(MAX_OUTPUT / largest_growth(backend)))
        special = {
            token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids = frozenset(special)
        control = ControlTokens(special.values(), foreign="".join(settings.templates.values()))

        def embedded_id(token: str) -> int | None:
            token_id: int | None = backend.token_to_id(token)
            return token_id if token_id is not None and token_id < embedded else None

        self.answer_format = answer_format_of(settings.templates.values(), embedded_id, self.special_ids)
        self._control = control
        self._templates = ChatTemplates(
            where, settings.templates, settings.named_tokens, control, harmony=self.answer_format.harmony
        )
        if self._templates.takes_tools and self.answer_format.calls is None and not self.answer_format.harmony:
            calls = call_format_in(self.answer_format.markers, settings.templates.values())
            self.answer_format = msgspec.structs.replace(self.answer_format, calls=calls, unknown_calls=calls is None)
        if self._templates and not self._templates.takes_tools:
            self.answer_format = msgspec.structs.replace(self.answer_format, sees_tools=False)
        if self._thinking_is_opt_in(settings.templates.values()):
            self.answer_format = msgspec.structs.replace(self.answer_format, thinking_is_opt_in=True)
        self._quoting_backend = quoting_backend(backend, control)
        self._path = Path(where, "tokenizer.json")

    @classmethod
    def load(cls, folder: Path, vocab_size: int | None = None, chat_template: str | None = None) -> Tokenizer:
        """Read tokenizer.json and the files next to it.

        vocab_size: the model's. Some tokenizers know more ids; texts may contain these, and the engine refuses prompts
        with them. chat_template: a file that replaces the checkpoint's templates. Raises `CheckpointError`, naming the
        file that cannot be used.
        """
        tokenizer = cls.begin_load(folder, vocab_size, chat_template)
        tokenizer.complete()
        return tokenizer

    @classmethod
    def begin_load(cls, folder: Path, vocab_size: int | None = None, chat_template: str | None = None) -> Tokenizer:
        """Like load(), without `complete`, which takes a third of the time. Another thread may call that later."""
        folder = Path(folder)
        settings = read_settings(folder)
        if chat_template is not None:
            settings = settings._replace(templates={"default": read_text(Path(chat_template).expanduser())})
        refuse_without_json(folder)
        path = folder / "tokenizer.json"
        backend = read_backend(path)
        with _unusable(path):
            apply_settings(backend, settings)
            added = backend.get_added_tokens_decoder()
            # Checked before they are used: a hundred thousand added tokens take seconds.
            _check_ids(path, max(added, default=0))
            if len(added) > _MAX_ADDED_TOKENS:
                raise CheckpointError(f"{path} has {len(added)} added tokens; the limit is {_MAX_ADDED_TOKENS}")
            tokenizer = cls(backend, settings, str(folder), MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size)
            backend.decode(tokenizer.encode_now("a b"))
        return tokenizer

    def complete(self) -> None:
        """Read the vocabulary and check its ids. Raises `CheckpointError`."""
        with _unusable(self._path):
            highest = self._vocabulary.size - 1
        _check_ids(self._path, highest)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._backend, self.special_ids)

    @property
    def vocab_size(self) -> int:
        """The highest id plus one. Some smaller ids may be unused."""
        return self._vocabulary.size

    @property
    def pieces(self) -> PieceTable | None:
        """The text of each token. None means that the decoder does not read tokens one by one."""
        return self._vocabulary.pieces

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token that tokenizer_config.json names."""
        return self._named_id("eos_token")

    @property
    def info(self) -> TokenizerInfo:
        """The facts about the tokenizer that its files state."""
        settings = self._settings
        templates = settings.templates
        added = sorted(self._backend.get_added_tokens_decoder().items())
        return TokenizerInfo(
            tokenizer_class=settings.tokenizer_class,
            additional_special_tokens=settings.extra_special,
            added_tokens_decoder={
                str(token_id): AddedTokenInfo(
                    token.content, token.special, token.normalized, token.lstrip, token.rstrip, token.single_word
                )
                for token_id, token in added
            },
            add_bos_token=settings.add_bos,
            add_eos_token=settings.add_eos,
            chat_template=templates["default"] if templates.keys() == {"default"} else templates or None,
            **{name: settings.named_tokens.get(name) for name in NAMED_TOKENS},
        )

    def is_token(self, token_id: int) -> bool:
        """Return whether the id is a token's; some ids below `vocab_size` are not."""
        return token_id in self._vocabulary.tokens

    def token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary writes it; None for unknown ids."""
        return self._vocabulary.tokens.get(token_id)

    def encode_now(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a raw prompt. Special tokens written in it are control tokens.

        add_special_tokens: whether BOS and EOS are added as the checkpoint defines it. Holds the loop for about 0.25 ms
        per 1,000 characters. Raises `InvalidRequestError` for lone surrogates.
        """
        return self._encode(self._backend, text, add_special_tokens)

    async def encode(
        self, text: str, add_special_tokens: bool = True, context: int | None = None, left: int = 1
    ) -> list[int]:
        """Like encode_now(), but in a thread if the text is long or may take long.

        context: the model's context length. left: how many tokens of it must remain after the prompt; 0 if nothing is
        to be drawn. Raises `ContextLengthError` if fewer remain, at once if the text's length alone shows it.
        """
        self._refuse_too_long(text, context, left)
        return await self._encode_queued(self._backend, text, add_special_tokens, context, left)

    async def encode_literal(self, text: str, context: int, left: int = 1) -> list[int]:
        """Like encode(), but special tokens written in the text are plain text."""
        self._refuse_too_long(text, context, left)
        backend, marker = self._backend, self._control.marker_for(text)
        if marker is not None:
            text, quoted = marker.settle(str(marker.mark_text(text)))
            backend = self._quoting_backend if quoted else backend
        return await self._encode_queued(backend, text, True, context, left)

    async def encode_pair(self, first: str, second: str, context: int, left: int = 1) -> list[int]:
        """Like encode() for two texts, joined as the checkpoint defines it."""
        self._refuse_too_long(first + second, context, left)
        return await self._encode_queued(self._backend, (first, second), True, context, left)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary writes it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def _thinking_is_opt_in(self, templates: Iterable[str]) -> bool:
        """Return whether `enable_thinking` changes a chat, and leaving it out means false."""
        if not any("enable_thinking" in template for template in templates):
            return False
        hello = [{"role": "user", "content": "hello"}]
        with suppress(AengineError):  # the template refuses this chat, or any
            by_default, disabled, enabled = (
                self._templates.render(hello, template_kwargs=kwargs)
                for kwargs in (None, {"enable_thinking": False}, {"enable_thinking": True})
            )
            return by_default == disabled != enabled
        return False

    def writes_images_of_results(self, marker: str) -> bool:
        """Whether the chat template writes this marker for an image in the result of a tool."""
        return self._templates.writes_images_of_results(marker)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        context: int | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """Return the ids of a chat, rendered by the checkpoint's template. Nothing is added around it.

        With `continue_final_message` they end with the last message's content instead of a prompt for a new message.
        The template's own special tokens are control tokens; special tokens written in messages, tools and arguments
        are plain text. Raises the errors of `ChatTemplates.render`, and `ContextLengthError` as encode() does.
        """

        def work(most: int) -> tuple[str, Backend, list[int] | None] | None:
            if characters([messages, tools, options.get("template_kwargs")], most) > most:
                return None
            text, quoted = self._templates.render(messages, tools, **options)
            self._refuse_too_long(self._control.plain(text) if quoted else text, context)
            backend = self._quoting_backend if quoted else self._backend
            short = self.is_quick and len(text) <= INLINE_CHARACTERS
            return text, backend, self._encode(backend, text, False, context) if short else None

        rendered = await _in_thread(lambda: work(_LONG_CHARACTERS), self._renderings)
        if rendered is None:
            rendered = await _in_thread(lambda: work(sys.maxsize), self._long_renderings)
        assert rendered is not None
        text, backend, ids = rendered
        return await self._encode_queued(backend, text, False, context) if ids is None else ids

    async def encode_chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        context: int | None = None,
        **options: Unpack[TemplateOptions],
    ) -> ChatPrompt:
        """Like encode_chat(), and find out whether the template or the last message opens a thought."""
        token_ids = await self.encode_chat(messages, tools, context, **options)
        end = self.decode(token_ids[-_MARKER_TOKENS:], skip_special_tokens=False)
        markers = self.answer_format.thought_markers
        opens = end.rstrip().endswith(markers.begin)
        if options.get("continue_final_message", False):
            content = str(messages[-1].get("content"))
            opens = opens or content.rfind(markers.begin) > content.rfind(markers.end)
        return ChatPrompt(token_ids, opens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids. Bytes that are not UTF-8 become U+FFFD. Unknown ids add nothing.

        If the library fails with these ids, the text is U+FFFD: an error in a step would end the requests of others.
        """
        if self.pieces is not None:
            return self.pieces.decode(token_ids, skip_special_tokens)
        try:
            with library_errors(lambda error: CheckpointError(str(error))):
                return self._decode(token_ids, skip_special_tokens)
        except CheckpointError:
            return "\ufffd"

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        tokens = self._vocabulary.tokens
        known = [token_id for token_id in token_ids if token_id in tokens]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the id adds inside a text, also for special tokens; none for unknown ids."""
        if self.pieces is not None:
            return self.pieces.bytes_of(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Like token_bytes(), as text, with U+FFFD for bytes that are not UTF-8 by themselves."""
        if self.pieces is not None and (text := self.pieces.shown.get(token_id)) is not None:
            return text  # the same object each time: an answer may hold a million of them
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _named_id(self, name: str) -> int | None:
        token = self._settings.named_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _refuse_too_long(self, text: str, context: int | None, left: int = 1) -> None:
        if context is not None and (longest := self._vocabulary.longest) is not None:
            _check_fits(minimum_tokens(text, longest), context, left, "at least ")

    async def _encode_queued(
        self, backend: Backend, text: Text, add_special_tokens: bool, context: int | None, left: int = 1
    ) -> list[int]:
        """Tokenize in a thread, in the queue for texts of about that length.

        If the caller is cancelled in the queue, its text is not tokenized.
        """
        if self.is_quick and _characters(text) <= INLINE_CHARACTERS:
            return self._encode(backend, text, add_special_tokens, context, left)
        turns = self._medium if _characters(text) <= _LONG_CHARACTERS else self._long
        with anyio.move_on_after(math.inf if self.is_quick else MAX_SECONDS):
            return await _in_thread(lambda: self._encode(backend, text, add_special_tokens, context, left), turns)
        raise InvalidRequestError(
            f"the tokenizer takes longer than {MAX_SECONDS:g} seconds for this text, or for texts before it"
        )

    def _encode(
        self, backend: Backend, text: Text, add_special_tokens: bool, context: int | None = None, left: int = 1
    ) -> list[int]:
        size = _characters(text)
        if size > self._most_characters:
            raise InvalidRequestError(f"the text has {size} characters; the limit is {self._most_characters}")
        try:
            for part in (text,) if isinstance(text, str) else text:
                part.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text holds a lone surrogate at character {error.start}") from error
        with library_errors(lambda error: InvalidRequestError(f"the tokenizer cannot read this text: {error}")):
            # The batch call releases the GIL and computes no offsets; `encode` does neither.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if context is not None:
            _check_fits(len(encoding), context, left)  # before the ids become a list
        ids: list[int] = encoding.ids
        if size > INLINE_CHARACTERS:
            time.sleep(0)  # making the list and freeing the encoding hold the GIL: let the loop run in between
        return ids


def _characters(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def _check_fits(tokens: int, context: int, left: int, qualifier: str = "") -> None:
    if tokens + left > context:
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens. However, {qualifier}{tokens} tokens are given "
            f"as prompt{', and at least one must be left' if left else ''}",
            "prompt",
        )


async def _in_thread(work: Callable[[], T], turns: anyio.CapacityLimiter) -> T:
    # A cancelled caller does not wait for the thread. The thread keeps its place in the limiter until it ends.
    return await to_thread.run_sync(work, limiter=turns, abandon_on_cancel=True)


def _unusable(path: Path) -> AbstractContextManager[None]:
    """Turn errors of the tokenizers library into `CheckpointError`."""
    return library_errors(lambda error: CheckpointError(f"{path} cannot be used: {error!s:.300}"))


def _check_ids(path: Path, highest: int) -> None:
    if not 0 <= highest <= MAX_TOKEN_ID:
        raise CheckpointError(f"{path} has token ids up to {highest}, but they must be from 0 to {MAX_TOKEN_ID}")
