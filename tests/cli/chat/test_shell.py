"""The chat shell: typed lines, printed answers, commands and Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from aengine.cli.chat.shell import Shell
from aengine.errors import InvalidRequestError
from aengine.types import Completion, Fragment, Usage

pytestmark = pytest.mark.anyio

ENDING = Fragment("", finish_reason="stop", usage=Usage(18, 12, 16))
HELLO = (Fragment("Hel"), Fragment("lo."), ENDING)


class FakeModel:
    """Gives the same answer each time, and records the questions. An exception is raised, and None waits forever."""

    def __init__(self, *answer: Fragment | Exception | None) -> None:
        self.answer: Sequence[Fragment | Exception | None] = answer or HELLO
        self.asked: list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = []
        self.closed = 0

    async def complete(self, prompt: Any, **options: Any) -> Completion:
        raise NotImplementedError

    async def chat(self, messages: Any, **options: Any) -> Completion:
        raise NotImplementedError

    async def chat_stream(
        self, messages: list[dict[str, Any]], *, template_kwargs: dict[str, Any], adapter: str | None, **sampling: Any
    ) -> AsyncGenerator[Fragment, None]:
        self.asked.append(([*messages], sampling, template_kwargs))
        try:
            for part in self.answer:
                if isinstance(part, Exception):
                    raise part
                if part is None:
                    os.kill(os.getpid(), signal.SIGINT)
                    await anyio.sleep_forever()
                else:
                    yield part
        finally:
            self.closed += 1


def typing(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Return a `read` that returns these lines, and then ends the input. It raises an exception's type."""
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, str):
            return line
        raise line

    return read


async def session(model: FakeModel, *lines: str | type[BaseException], **given: Any) -> tuple[str, Shell]:
    """Run a session with these lines. Return its output and the shell."""
    out = io.StringIO()
    shell = Shell(model, out, given.pop("sampling", {}), given.pop("system", None), dim=given.pop("dim", False))
    await shell.run(typing(*lines))
    return out.getvalue(), shell


async def test_an_answer_and_its_figures() -> None:
    said, shell = await session(FakeModel(), "hi")
    assert said.startswith("Hello.\n[12 tokens, ")
    assert "tokens/s, first after 0 ms, 16 of 18 prompt tokens from the cache]" in said
    assert shell.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]


async def test_the_conversation_goes_on_until_it_is_reset() -> None:
    model = FakeModel()
    await session(model, "one", "two", "/reset", "three", system="Be short.")
    system = {"role": "system", "content": "Be short."}
    assert [[message["content"] for message in messages] for messages, _, _ in model.asked] == [
        ["Be short.", "one"],
        ["Be short.", "one", "Hello.", "two"],
        ["Be short.", "three"],
    ]
    assert model.asked[0][0][0] == system


async def test_parameters_are_set_shown_and_taken_back() -> None:
    model = FakeModel()
    said, _ = await session(
        model, "/set temperature 0.7", "/set stop END", "/set thinking true", "a", "/get", "/set temperature", "b"
    )
    assert model.asked[0][1:] == ({"temperature": 0.7, "stop": ("END",)}, {"enable_thinking": True})
    assert model.asked[1][1] == {"stop": ("END",)}
    assert 'temperature 0.7\nstop ["END"]\nthinking true\n' in said


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temperature hot", "temperature"),
        ("/set", "/set needs a name: thinking, max_tokens"),
        ("/set heat 3", "no parameter 'heat'"),
        ("/set n 2", "no parameter 'n'"),
        ("/set thinking perhaps", "thinking"),
        ("/sing", "/help"),
        ("/save", "name of a file"),
        ("/load /nonexistent/file", "No such file"),
        ("/get temperature", "temperature has not been set"),
    ],
)
async def test_a_failed_command_is_reported_and_the_shell_continues(line: str, told: str) -> None:
    model = FakeModel()
    said, _ = await session(model, line, "hi")
    assert told in said.splitlines()[0]
    assert len(model.asked) == 1


async def test_help_names_every_command() -> None:
    said, _ = await session(FakeModel(), "/help")
    for command in ("/set", "/get", "/system", "/reset", "/save", "/load", "/help", "/quit"):
        assert command in said


async def test_quit_leaves_at_once() -> None:
    model = FakeModel()
    await session(model, "/quit", "hi")
    assert model.asked == []


async def test_a_saved_chat_can_be_loaded(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    await session(FakeModel(), "/set temperature 0.5", "/set stop END", "/set thinking false", "hi", f"/save {file}")
    model = FakeModel()
    await session(model, f"/load {file}", "more", system="is replaced")
    messages, sampling, template_kwargs = model.asked[0]
    assert [message["content"] for message in messages] == ["hi", "Hello.", "more"]
    assert sampling == {"temperature": 0.5, "stop": ("END",)}
    assert template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("content", ["{", "[]", '{"messages": [{}]}', '{"messages": [], "sampling": {"x": 1}}'])
async def test_another_file_is_not_loaded(tmp_path: Path, content: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    said, shell = await session(FakeModel(), "hi", f"/load {file}")
    assert "loaded" not in said
    assert len(shell.messages) == 2


async def test_thoughts_are_dim_and_stay_out_of_the_conversation() -> None:
    model = FakeModel(Fragment("", reasoning="hm"), Fragment("yes"), ENDING)
    said, shell = await session(model, "hi", dim=True)
    assert said.startswith("\x1b[2mhm\x1b[0m\n\nyes\x1b[2m\n[12 tokens")
    assert shell.messages[-1]["content"] == "yes"


async def test_a_model_cannot_speak_to_the_terminal() -> None:
    said, _ = await session(FakeModel(Fragment("a\x1b]0;evil\x07\x9bb\tc\n\r"), ENDING), "hi")
    assert said.startswith("a\ufffd]0;evil\ufffd\ufffdb\tc\n\ufffd\n[")


async def test_an_error_is_printed_and_the_question_removed() -> None:
    said, shell = await session(FakeModel(InvalidRequestError("no such thing", "x")), "hi")
    assert said.startswith("[no such thing]\n")
    assert shell.messages == []


async def test_an_answer_cut_off_by_max_tokens_is_marked() -> None:
    said, _ = await session(FakeModel(Fragment("a"), Fragment("", finish_reason="length", usage=Usage(1, 1, 0))), "hi")
    assert "cut off" in said
    assert "tokens/s" not in said  # one token has no rate


async def test_ctrl_c_stops_the_answer_and_not_the_shell() -> None:
    model = FakeModel(Fragment("Once"), None)
    out = io.StringIO()
    shell = Shell(model, out, {}, None, dim=False)

    def read(prompt: str) -> str:
        assert model.closed == len(model.asked)  # the answer before has ended
        if len(model.asked) == 2:
            raise EOFError
        return "tell"

    await shell.run(read)
    assert out.getvalue().count("Once\n[stopped]\n") == 2
    assert [message["content"] for message in shell.messages] == ["tell", "Once", "tell", "Once"]


async def test_a_second_ctrl_c_between_answer_and_prompt_does_not_end_the_shell() -> None:
    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if "[stopped]" in text:
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    before = signal.getsignal(signal.SIGINT)
    model = FakeModel(Fragment("Once"), None)
    await Shell(model, Out(), {}, None, dim=False).run(typing("tell", "tell"))
    assert len(model.asked) == 2
    assert signal.getsignal(signal.SIGINT) is before


async def test_ctrl_c_while_typing_gives_up_the_line() -> None:
    model = FakeModel()
    await session(model, KeyboardInterrupt, "hi")
    assert len(model.asked) == 1
