"""The chat shell: reads lines, prints answers, runs /commands. It uses neither readline nor an engine itself."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, TextIO

import anyio
import msgspec

from aengine.cli.errors import UsageError
from aengine.cli.images import Part, read_image, read_message, user_message, written_message
from aengine.cli.model import Model
from aengine.cli.sampling import parse_parameter
from aengine.errors import AengineError
from aengine.requests.sampling_params import NAMES
from aengine.types import Fragment, Usage

PROMPT = "> "
HELP = """\
  /set NAME VALUE   set a sampling parameter: /set temperature 0.7, /set max_tokens none
                    or thoughts, if the model has a switch: /set thinking true|false|none
  /set NAME         use the model's own value again
  /get              show the values that were set
  /image FILE       add an image to the next message; without FILE: remove its images
  /system TEXT      set the system prompt; without TEXT: remove it
  /reset            start a new conversation
  /save FILE        save the conversation and the parameters; /load FILE loads them
  /help             show this help
  /quit             leave, like Ctrl-D; Ctrl-C stops an answer
"""
# Control characters in an answer could move the cursor or control the terminal. U+FFFD is shown instead.
_REPLACED_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
# The shell shows one answer, as text.
_SHELL_NAMES = tuple(name for name in NAMES if name not in ("n", "logprobs", "prompt_logprobs"))


class SavedChat(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a file that `/save` writes."""

    messages: list[dict[str, Any]]
    sampling: dict[str, Any] = {}
    thinking: bool | None = None


class Shell:
    """One conversation.

    dim: whether thoughts and remarks are printed dim, by escape sequences. before_line: awaited before a line is read,
    which blocks the event loop. images: go with the first message. no_images: why the model takes none.
    """

    def __init__(
        self,
        model: Model,
        out: TextIO,
        sampling: dict[str, Any],
        system: str | None = None,
        adapter: str | None = None,
        *,
        dim: bool,
        before_line: Callable[[], Awaitable[None]] | None = None,
        images: list[Part] | None = None,
        no_images: str = "",
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sampling = dict(sampling)
        self.thinking: bool | None = None
        self.has_failed = False  # whether any answer ended with an error
        self._model = model
        self._images = images or []  # of the next message
        self._no_images = no_images
        self._adapter = adapter
        self._before_line = before_line
        self._out = out
        self._dim = ("\x1b[2m", "\x1b[0m") if dim else ("", "")
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._print(HELP),
            "/reset": lambda _: self._reset(),
            "/image": self._image,
            "/system": self._system,
            "/set": self._set,
            "/get": self._get,
            "/save": self._save,
            "/load": self._load,
        }
        if system:
            self._system(system)

    async def run(self, read: Callable[[str], str]) -> None:
        """Read and answer lines until `/quit` or the end of the input.

        Must run in the main thread; the shell handles SIGINT meanwhile. `read` blocks the event loop. It raises
        `EOFError` at the end of the input, and `KeyboardInterrupt` if the user gives up the line.
        """
        before = signal.getsignal(signal.SIGINT)
        try:
            await self._run_lines(read)
        finally:
            signal.signal(signal.SIGINT, before)

    async def _run_lines(self, read: Callable[[str], str]) -> None:
        while True:
            if self._before_line is not None:
                await self._before_line()
            try:
                line = _read_line(read).strip()
            except EOFError:
                self._print("\n")
                return
            except KeyboardInterrupt:
                self._print("\n")
                continue
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._run_command(line)
            elif line:
                await self._answer(line)

    # ---- answers ------------------------------------------------------------------------------------------

    async def _answer(self, line: str) -> None:
        self.messages.append(user_message(line, self._images))
        content: list[str] = []
        try:
            with anyio.CancelScope() as scope, _cancel_on_interrupt(scope):
                await self._print_answer(content)
        except AengineError as error:
            self.has_failed = True
            self._remark(f"\n[{error}]" if content else f"[{error}]")
        if scope.cancelled_caught:
            self._remark("\n[stopped]")
        if content:
            self.messages.append({"role": "assistant", "content": "".join(content)})
            self._images = []
        else:
            self.messages.pop()  # a question without an answer would confuse the next answer
            if self._images:
                self._remark(f"[{_images(self._images)}; /image removes them]")

    async def _print_answer(self, content: list[str]) -> None:
        begin, first = time.perf_counter(), 0.0
        thought = False
        template_kwargs = {} if self.thinking is None else {"enable_thinking": self.thinking}
        answer = self._model.chat_stream(
            self.messages, template_kwargs=template_kwargs, adapter=self._adapter, **self.sampling
        )
        async with aclosing(answer):
            async for fragment in answer:
                if fragment.reasoning or fragment.text or fragment.usage:
                    first = first or time.perf_counter()
                if fragment.reasoning:
                    thought = True
                    self._print(f"{self._dim[0]}{fragment.reasoning.translate(_REPLACED_CONTROLS)}{self._dim[1]}")
                if fragment.text:
                    self._print(
                        ("\n\n" if thought and not content else "") + fragment.text.translate(_REPLACED_CONTROLS)
                    )
                    content.append(fragment.text)
                if fragment.usage is not None:
                    during = time.perf_counter() - first
                    self._remark(f"\n{_figures(fragment, fragment.usage, first - begin, during)}")

    # ---- commands -----------------------------------------------------------------------------------------

    def _run_command(self, line: str) -> None:
        name, _, arguments = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            self._remark(f"[there is no command {name}; /help shows the commands]")
            return
        try:
            command(arguments.strip())
        except (UsageError, OSError) as error:
            self._remark(f"[{error}]")

    def _reset(self) -> None:
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        self._remark("[a new conversation]")

    def _image(self, file: str) -> None:
        if file and self._no_images:
            raise UsageError(f"the model takes no images: {self._no_images}")
        self._images = [*self._images, read_image(file, "/image")] if file else []
        self._remark(f"[{_images(self._images)}]")

    def _system(self, text: str) -> None:
        self.messages = [message for message in self.messages if message["role"] != "system"]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def _set(self, arguments: str) -> None:
        name, _, value = arguments.partition(" ")
        if not name:
            raise UsageError(f"/set needs a name: thinking, {', '.join(_SHELL_NAMES)}")
        if name == "thinking":
            if value not in ("true", "false", "none", ""):
                raise UsageError(f"thinking is true, false or none, not {value!r}")
            self.thinking = None if value in ("none", "") else value == "true"
        elif name not in _SHELL_NAMES:
            raise UsageError(f"there is no parameter {name!r} here; known are thinking, {', '.join(_SHELL_NAMES)}")
        elif value:
            self.sampling[name] = parse_parameter(name, value)
        else:
            self.sampling.pop(name, None)

    def _get(self, name: str) -> None:
        values = self.sampling | ({} if self.thinking is None else {"thinking": self.thinking})
        shown = {key: value for key, value in values.items() if not name or key == name}
        for key, value in shown.items():
            self._print(f"{key} {msgspec.json.encode(value).decode()}\n")
        if not shown:
            unset = f"{name} has not been set" if name else "no parameter has been set"
            self._remark(f"[{unset}: the model's own values apply]")

    def _save(self, file: str) -> None:
        saved = SavedChat([written_message(one) for one in self.messages], self.sampling, self.thinking)
        _path(file, "save").write_bytes(msgspec.json.format(msgspec.json.encode(saved)) + b"\n")
        self._remark(f"[saved: {len(self.messages)} messages]")

    def _load(self, file: str) -> None:
        try:
            saved = msgspec.json.decode(_path(file, "load").read_bytes(), type=SavedChat)
            messages = [read_message(message) | {"role": message["role"]} for message in saved.messages]
            sampling = {name: parse_parameter(name, _as_text(value)) for name, value in saved.sampling.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
            raise UsageError(f"{file} is not a file of /save: {error}") from None
        self.messages, self.sampling, self.thinking = messages, sampling, saved.thinking
        self._remark(f"[loaded: {len(messages)} messages]")

    # ---- output -------------------------------------------------------------------------------------------

    def _print(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _remark(self, text: str) -> None:
        begin, end = self._dim
        self._print(f"{begin}{text.translate(_REPLACED_CONTROLS)}{end}\n")


def _images(images: list[Part]) -> str:
    return f"{len(images) or 'no'} {'image goes' if len(images) == 1 else 'images go'} with the next message"


def _path(file: str, command: str) -> Path:
    if not file:
        raise UsageError(f"/{command} needs the name of a file")
    return Path(file).expanduser()


def _as_text(value: Any) -> str:
    return msgspec.json.encode(value).decode() if not isinstance(value, str) else value


def _figures(last: Fragment, usage: Usage, before: float, during: float) -> str:
    parts = [f"{usage.completion_tokens} tokens"]
    if usage.completion_tokens > 1 and during > 0:
        parts.append(f"{(usage.completion_tokens - 1) / during:.1f} tokens/s")
    parts.append(f"first after {before * 1000:.0f} ms")
    parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from the cache")
    if last.finish_reason == "length":
        parts.append("cut off: out of tokens")
    return f"[{', '.join(parts)}]"


def _read_line(read: Callable[[str], str]) -> str:
    """Read a line. Ctrl-C only has an effect here and during an answer."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return read(PROMPT)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _cancel_on_interrupt(scope: anyio.CancelScope) -> Iterator[None]:
    """Within the context, Ctrl-C cancels the scope."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, scope.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
