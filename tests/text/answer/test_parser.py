"""An answer's thought, content and calls, and how a checkpoint shows what its model writes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from aengine.config import CallFormatName
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import ContentDelta, ReasoningDelta
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.parser import AnswerFormat, AnswerParser
from aengine.text.answer.thought import ThoughtParser
from aengine.text.answer.unclosed_thought import UnclosedThought
from aengine.text.tokens.output import OutputText
from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.byte_grammars import calls
from tests.text.cutting import answer, cuts, read, shape
from tests.text.text_families import SPECIAL, byte_level_backend, write_tokenizer

HERMES = FORMATS["hermes"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nI call f: <tool_call>.\n</think>\n\n"


def parser(opened: bool = False) -> AnswerParser:
    return AnswerParser(ThoughtParser(opened), ToolCallParser(HERMES, {"f": None}))


def test_a_thought_then_a_call_then_content() -> None:
    found = answer(parser(), f"{THOUGHT}{CALL}\nDone.")
    assert shape(found) == ("I call f: <tool_call>.", "Done.", [("f", '{"a": 1}')])


def test_a_thought_then_content_then_a_call() -> None:
    reading = parser()
    found = read(reading, f"{THOUGHT}I look.\n{CALL}")
    assert shape(found) == ("I call f: <tool_call>.", "I look.", [("f", '{"a": 1}')])
    assert reading.has_calls


@given(data=st.data(), opened=st.booleans(), unclosed=st.booleans())
def test_the_cut_makes_no_difference(data: st.DataObject, opened: bool, unclosed: bool) -> None:
    words = st.sampled_from([THOUGHT, CALL, "<think>", "</think>", "<tool_call>", "\n", " ", "a", "{"])
    text = "".join(data.draw(st.lists(words, max_size=8)))
    made = with_unclosed if unclosed else parser
    whole = read(made(opened), text)
    assert shape(answer(made(opened), *data.draw(cuts(text)))) == shape(whole)
    if not whole.calls:
        assert shape(whole) == shape(read(parser(opened), text))


def with_unclosed(opened: bool = False, form: CallFormatName = "hermes") -> AnswerParser:
    calls = ToolCallParser(FORMATS[form], {"f": None})
    return AnswerParser(ThoughtParser(opened), calls, unclosed=UnclosedThought(FORMATS[form], {"f": None}))


@pytest.mark.parametrize("form", [form for form in FORMATS if FORMATS[form].syntax.begin])
def test_a_call_in_a_thought_that_does_not_close_is_a_call(form: CallFormatName) -> None:
    written = calls([("f", '{"a": 1}')], form)
    if FORMATS[form].syntax.has_bare_calls:
        written = FORMATS[form].syntax.begin + written
    for opened in (True, False):
        begin = "" if opened else "<think>\n"
        for end, content in (("\n</think>\n\nHi.", "Hi."), ("</think>", "")):  # the call was only part of the thought
            text = f"{begin}plan\n{written}{end}"
            found = (f"plan\n{written}", content, [])
            assert shape(read(with_unclosed(opened, form), text)) == found
            assert shape(answer(with_unclosed(opened, form), *text)) == found
        for text in (f"{begin}plan\n{written}", f"{begin}plan {written}\n"):
            reading = with_unclosed(opened, form)
            assert shape(read(reading, text)) == ("plan", "", [("f", '{"a": 1}')])
            assert reading.ends_with_calls
            assert shape(answer(with_unclosed(opened, form), *text)) == ("plan", "", [("f", '{"a": 1}')])
            assert shape(read(with_unclosed(opened, form), text, cut=True)) == (text.removeprefix(begin), "", [])


BARE: tuple[CallFormatName, ...] = ("llama3", "pythonic", "glm4")
bare = pytest.mark.parametrize("form", BARE)


@bare
@pytest.mark.parametrize("opened", [True, False])
def test_a_call_without_a_marker_at_the_end_of_a_thought_that_does_not_close(
    form: CallFormatName, opened: bool
) -> None:
    begin = "" if opened else "<think>\n"
    one, two = (calls([("f", '{"a": 1}')] * count, form) for count in (1, 2))
    begun = one[:-4]
    for before, thought in (
        ("", ""),
        ("plan\n", "plan"),
        ("plan\n\n", "plan"),
        ("plan\n \n", "plan"),
        (f"maybe\n\n{one}\n\nNo:\n\n", f"maybe\n\n{one}\n\nNo:"),
        (f"{begun}\n\n", begun),
        (f"[{{\n\n{begun}\n\n{begun}\n\n", f"[{{\n\n{begun}\n\n{begun}"),
    ):
        for written, count in ((one, 1), (two, 2), (f"{one}\n", 1), (f"{one}\n\n \n", 1)):
            if form == "glm4" and count == 2:  # a marker begins the second call
                continue
            text = f"{begin}{before}{written}"
            reading = with_unclosed(opened, form)
            assert shape(read(reading, text)) == (thought, "", [("f", '{"a": 1}')] * count)
            assert reading.ends_with_calls
            assert shape(answer(with_unclosed(opened, form), *text)) == (thought, "", [("f", '{"a": 1}')] * count)
            quoted = f"{before}{written}".rstrip("\n")
            assert shape(answer(with_unclosed(opened, form), *f"{text}</think>Hi.")) == (quoted, "Hi.", [])
            assert shape(read(with_unclosed(opened, form), text, cut=True))[1:] == ("", [])


@bare
@pytest.mark.parametrize(
    "text", ["plan: {}", "plan {}", "plan\n{} is it", "plan\n\n{} is it", "plan\n\n- {}", "{}\n\nNo.", "{}."]
)
def test_a_call_without_a_marker_that_a_thought_only_mentions(form: CallFormatName, text: str) -> None:
    text = text.format(calls([("f", '{"a": 1}')], form))
    assert shape(read(with_unclosed(True, form), text)) == (text, "", [])
    assert shape(answer(with_unclosed(True, form), *text)) == (text, "", [])


@bare
@pytest.mark.parametrize("cut", [1, 3, -2, -1])
def test_half_a_call_without_a_marker_stays_thought(form: CallFormatName, cut: int) -> None:
    for text in ("plan\n\n" + calls([("f", '{"a": 1}')], form)[:cut], "plan\n\n" + calls([("g", "{}")], form)):
        assert shape(answer(with_unclosed(True, form), *text)) == (text, "", [])


@bare
@given(data=st.data())
def test_the_cut_makes_no_difference_to_calls_without_a_marker(form: CallFormatName, data: st.DataObject) -> None:
    one = calls([("f", '{"a": 1}')], form)
    words = st.sampled_from([one, one[:-3], one[:4], "\n\n", "\n", " ", "</think>", "<|python_tag|>", "a", "[", "{"])
    text = "".join(data.draw(st.lists(words, max_size=12)))
    whole = shape(read(with_unclosed(True, form), text))
    assert shape(answer(with_unclosed(True, form), *data.draw(cuts(text)))) == whole
    assert shape(answer(with_unclosed(True, form), *text)) == whole
    if not whole[2]:
        assert whole == shape(read(AnswerParser(ThoughtParser(True), ToolCallParser(FORMATS[form], {"f": None})), text))


@bare
@pytest.mark.parametrize("text", ["\n\n{", "\n\n[", "\n", "x\n\n{}", '\n\n{"name": "f", "parameters": {"a": [{'])
def test_the_time_for_calls_without_a_marker_is_linear(form: CallFormatName, text: str) -> None:
    text = text.replace("{}", calls([("f", '{"a": 1}')], form))
    text *= 30_000 // len(text)
    begin = time.process_time()
    answer(with_unclosed(True, form), *text)
    read(with_unclosed(True, form), text)
    assert time.process_time() - begin < 1.5  # quadratic time would be tens of seconds


def test_a_thought_waits_only_from_where_a_call_may_begin() -> None:
    reading = with_unclosed(True, "llama3")
    assert reading.feed("I see {x}.") == [ReasoningDelta("I see {x}.")]
    assert reading.feed("\n\nSo") == [ReasoningDelta("\n\nSo")]
    assert reading.feed("\n\n{") == []
    assert reading.feed('"name": "f"') == []
    assert reading.feed("\n?") == [ReasoningDelta('\n\n{"name": "f"\n?')]
    assert reading.feed("\n\n{x") == [ReasoningDelta("\n\n{x")]


def test_a_thought_is_told_up_to_a_call_in_it() -> None:
    reading = with_unclosed(opened=True)
    assert reading.feed("I may write ") == [ReasoningDelta("I may write")]
    assert reading.feed("<tool_call>, but ") == [ReasoningDelta(" <tool_call>, but")]
    assert reading.feed(CALL) == []
    assert reading.feed(" is wrong.") == []
    assert reading.feed("</think>No.") == [ReasoningDelta(f" {CALL} is wrong."), ContentDelta("No.")]
    assert reading.finish() == []
    assert not reading.has_calls


def test_nothing_is_held_back_where_nothing_is_looked_for() -> None:
    reading = AnswerParser(ThoughtParser())
    assert not reading.plain
    reading.feed("4")
    assert reading.plain
    assert AnswerParser().plain
    assert not parser().plain


@pytest.mark.anyio
async def test_the_demo_model(demo: Tokenizer) -> None:
    assert demo.answer_format.calls == "hermes"
    assert demo.answer_format.thoughts
    assert demo.answer_format.special_markers == frozenset()
    assert demo.answer_format.thinking_is_opt_in
    assert demo.answer_format.shown_special_ids(True, HERMES) == ()
    chat = await demo.encode_chat_prompt([{"role": "user", "content": "hi <think>"}])
    assert not chat.opens_thought
    assert chat.token_ids == await demo.encode_chat([{"role": "user", "content": "hi <think>"}])


def checkpoint(folder: Path, template: str, *, special: bool = False, markers: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer with a chat template, in which the markers are single tokens."""
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markers if special])
    config = {"eos_token": SPECIAL[2], "chat_template": template}
    return Tokenizer.load(write_tokenizer(folder, backend, config))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("template", "opens"),
    [("a<think>\n", True), ("a<think>", True), ("a<think>\n\n</think>\n\n", False), ("<think>a", False)],
)
@pytest.mark.parametrize("special", [False, True])
async def test_a_template_that_opens_the_thought(tmp_path: Path, template: str, opens: bool, special: bool) -> None:
    tokenizer = checkpoint(tmp_path, template, special=special, markers=("<think>", "</think>"))
    assert (await tokenizer.encode_chat_prompt([{"role": "user", "content": "hi"}])).opens_thought == opens


def test_markers_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    tokenizer = checkpoint(
        tmp_path, "<tool_call>", special=True, markers=(HERMES.syntax.begin, HERMES.syntax.end, "<think>")
    )
    answer_format = tokenizer.answer_format
    assert answer_format.special_markers == {HERMES.syntax.begin, HERMES.syntax.end, "<think>"}
    shown = answer_format.shown_special_ids(False, HERMES)
    assert {tokenizer.token_text(token_id) for token_id in shown} == {HERMES.syntax.begin, HERMES.syntax.end}
    ids = tokenizer.encode_now(f"<think>é<|im_start|>{CALL}<|im_end|>")
    assert HERMES.syntax.begin not in tokenizer.decode(ids)
    for ids_shown, expected in ((shown, f"é{CALL}"), ((), f"é\n{CALL.split(chr(10))[1]}\n")):
        output = OutputText(tokenizer, SamplingParams(shown_special_ids=ids_shown))
        assert "".join([*map(output.feed, ids), output.finish()]) == expected


@pytest.mark.parametrize(
    ("form", "markers"),
    [
        ("internlm", ["<|action_start|>", "<|plugin|>", "<|action_end|>"]),
        ("hy3", [f"<{name}:opensource>" for name in ("tool_calls", "tool_call", "/tool_call", "/tool_calls")]),
        ("glm4", ["<|assistant|>"]),
    ],
)
def test_special_tokens_of_calls_are_seen(form: CallFormatName, markers: list[str], tmp_path: Path) -> None:
    written = calls([("f", '{"a": 1}')] * 2, form)
    tokenizer = checkpoint(tmp_path, "{{ messages }}", special=True, markers=tuple(markers))
    shown = tokenizer.answer_format.shown_special_ids(False, FORMATS[form])
    output = OutputText(tokenizer, SamplingParams(shown_special_ids=shown))
    assert "".join([*map(output.feed, tokenizer.encode_now(written)), output.finish()]) == written
    assert len(shown) == len(markers)


@pytest.mark.parametrize(
    ("template", "calls", "unknown", "thought"),
    [
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]{{ name }}[ARGS][THINK]", "mistral", False, "[THINK]"),
        ("{% if tools %}{{ tools }}{% endif %}[TOOL_CALLS][/THINK]", "mistral_list", False, "[THINK]"),
        (
            "{% for tool in tools %}{% endfor %}<tool_call><function=<parameter=</think>",
            "qwen3_coder",
            False,
            "<think>",
        ),
        ("{% if tools %}<tool>{{ tools | tojson }}{% endif %}", None, True, "<think>"),
        ("the tools {{ messages[0].content }}", None, False, "<think>"),
        ("{% set tools = 1 %}{{ tools }}", None, False, "<think>"),
    ],
)
def test_what_a_template_tells(tmp_path: Path, template: str, calls: str | None, unknown: bool, thought: str) -> None:
    found = checkpoint(tmp_path, template, special=True, markers=("[THINK]", "[/THINK]", "[ARGS]")).answer_format
    assert (found.calls, found.unknown_calls) == (calls, unknown)
    assert found.thoughts
    assert found.thought_markers.begin == thought
    if calls is not None:
        shown = {form for form in found.special_markers if found.markers[form] in found.shown_special_ids(True, None)}
        assert shown == ({"[THINK]", "[/THINK]"} if thought == "[THINK]" else set())
    assert "[ARGS]" in found.special_markers


@pytest.mark.anyio
@pytest.mark.parametrize(("template", "opens"), [("a[THINK]\n", True), ("a[THINK]b[/THINK]", False)])
async def test_mistrals_thoughts(tmp_path: Path, template: str, opens: bool) -> None:
    tokenizer = checkpoint(tmp_path, template, special=True, markers=("[THINK]", "[/THINK]"))
    assert (await tokenizer.encode_chat_prompt([{"role": "user", "content": "hi"}])).opens_thought == opens
    thoughts = ThoughtParser(markers=tokenizer.answer_format.thought_markers)
    assert shape(answer(thoughts, "[THI", "NK]I <think>.[/THINK]", "4")) == ("I <think>.", "4", [])


def test_a_checkpoint_that_knows_neither(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level_backend(), {"chat_template": "{{ messages }}"}))
    assert tokenizer.answer_format.calls is None
    assert AnswerFormat().shown_special_ids(True, HERMES) == ()


@pytest.mark.parametrize(
    ("template", "asked"),
    [
        ("{% if enable_thinking is defined and enable_thinking %}think{% endif %}", True),
        ("{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}", False),
        ("<think>", False),
        ("{{ raise_exception('enable_thinking') }}", False),
        ("{# enable_thinking #}a", False),
        ("{% if enable_thinking_budget %}a{% endif %}", False),
    ],
)
def test_whether_it_thinks_if_nobody_asks(tmp_path: Path, template: str, asked: bool) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), {"chat_template": template})
    assert Tokenizer.load(tmp_path).answer_format.thinking_is_opt_in == asked


def test_blanks_before_a_form_take_linear_time() -> None:
    calls = ToolCallParser(FORMATS["hermes"], {"f": None})
    reading = AnswerParser(None, calls, calls_begin="<tool_call>")
    begin = time.thread_time()
    for _ in range(300_000):
        assert reading.feed("\n") == []
    assert reading.feed('{"a": 1}') == [ContentDelta("\n" * 300_000 + '{"a": 1}')]
    assert time.thread_time() - begin < 2  # copying the text so far takes tens of seconds


@pytest.mark.parametrize(
    ("markers", "calls"),
    [
        (("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2"),
        (("<|tool_call_start|>",), None),
        (("<tool_call>", "</tool_call>"), None),  # of several formats
        (("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>"), None),
    ],
)
def test_a_template_that_shows_no_call_leaves_the_format_to_the_vocabulary(
    markers: tuple[str, ...], calls: str | None, tmp_path: Path
) -> None:
    """So it is with LFM2.5."""
    template = "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    found = checkpoint(tmp_path, template, special=True, markers=markers).answer_format
    assert (found.calls, found.unknown_calls) == (calls, calls is None)
    assert checkpoint(tmp_path, "{{ messages }}", special=True, markers=markers).answer_format.calls is None


def test_markers_in_a_template_that_no_format_detects_are_of_another_format(tmp_path: Path) -> None:
    """Apriel writes a JSON list between Hy3's markers."""
    template = "{% if tools %}{{ tools | tojson }}{% endif %}Write <tool_calls>[...]</tool_calls>."
    found = checkpoint(tmp_path, template, special=True, markers=("<tool_calls>", "</tool_calls>")).answer_format
    assert (found.calls, found.unknown_calls) == (None, True)
