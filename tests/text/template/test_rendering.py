"""Chats become the same ids as in transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from aengine.errors import CheckpointError, InvalidRequestError
from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.text_families import byte_fallback_backend, byte_level_backend, write_tokenizer

pytestmark = pytest.mark.anyio

Messages = list[dict[str, Any]]

# Written for these tests. Together they use the features of published templates.
ALL = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "What's the weather like in <city> & around?",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Łódź"]}}},
        },
    }
]

CHATS: dict[str, Messages] = {
    "one question": [{"role": "user", "content": "hello world"}],
    "with a system prompt": [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "hi\n"}],
    "several turns": [
        {"role": "user", "content": "a < b && c > d?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "你好 👋🏽 café"},
        {"role": "assistant", "content": "fine", "reasoning_content": "they greet"},
        {"role": "user", "content": ""},
    ],
    "tools": [
        {"role": "user", "content": "the weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Łódź"}}}
            ],
        },
        {"role": "tool", "content": '{"sky": "<clear>"}', "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": None},
    ],
    "threads": [{"role": "user", "content": "a", "replies": [{"role": "user", "content": "b", "replies": []}]}],
}

CONFIG = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}


class Pair:
    """Our tokenizer and transformers' tokenizer of the same files."""

    def __init__(self, folder: Path) -> None:
        self.ours = Tokenizer.load(folder)
        self.theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        self.templates = str(self.theirs.chat_template)

    async def compare(self, messages: Messages, *, tools: Any = None, prompt: bool = True, **kwargs: Any) -> None:
        """Both give the same ids, or both refuse. Tools that the template would leave out are refused here."""
        if tools and not self.ours.answer_format.sees_tools:
            with pytest.raises(InvalidRequestError, match="no place for tools"):
                await self.ours.encode_chat(messages, tools, template_kwargs=kwargs, add_generation_prompt=prompt)
            return
        try:
            expected = self.theirs.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=True, return_dict=False, **kwargs
            )
        except (TemplateError, TypeError) as error:
            with pytest.raises(InvalidRequestError, match=re.escape(str(error))):
                await self.ours.encode_chat(messages, tools, template_kwargs=kwargs, add_generation_prompt=prompt)
        else:
            assert (
                await self.ours.encode_chat(messages, tools, template_kwargs=kwargs, add_generation_prompt=prompt)
                == expected
            )


Make = Callable[..., Pair]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def pair(template: object, **config: object) -> Pair:
        return Pair(write_tokenizer(tmp_path, byte_level_backend(), {**CONFIG, "chat_template": template, **config}))

    return pair


@pytest.fixture(scope="session", params=list(ALL))
def each_template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = {**CONFIG, "chat_template": ALL[request.param]}
    return Pair(write_tokenizer(tmp_path_factory.mktemp("template"), byte_level_backend(), config))


@pytest.mark.parametrize("chat", list(CHATS))
async def test_ids_are_transformers_ids(each_template: Pair, chat: str) -> None:
    for tools in (None, TOOLS):
        for prompt in (True, False):
            await each_template.compare(CHATS[chat], tools=tools, prompt=prompt)


async def test_documents_and_other_arguments_reach_the_template(each_template: Pair) -> None:
    documents = [{"title": "One", "text": "a\nb"}, {"title": "<Two>", "text": ""}]
    await each_template.compare(
        CHATS["one question"], documents=documents, enable_thinking=False, date_string="1 Jan", custom_tools=TOOLS
    )


async def test_content_in_parts_reaches_the_template(make: Make) -> None:
    parts = [{"type": "text", "text": "see <this>"}, {"type": "image"}, {"type": "text", "text": "and that"}]
    await make(ALL["documents"]).compare([{"role": "user", "content": parts}])


contents = st.text(st.sampled_from("ab <>|/\n\t\"'\\{}%é你👋_im"), max_size=20)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": contents}),
    min_size=1,
    max_size=4,
)


@given(messages=turns)
async def test_any_messages_give_transformers_ids(each_template: Pair, messages: Messages) -> None:
    await each_template.compare(messages)


@pytest.mark.parametrize("content", ["The answer is", "The answer is ", " a\n\n", "<think>\nLet me", "x<y é👋"])
async def test_a_message_that_is_continued_gives_transformers_ids(each_template: Pair, content: str) -> None:
    if "| map('upper') |" in each_template.templates:
        pytest.skip("changes the case of the message, and so of the tag behind it")
    messages: Messages = [*CHATS["one question"], {"role": "assistant", "content": content}]
    try:
        expected = each_template.theirs.apply_chat_template(
            messages, continue_final_message=True, tokenize=True, return_dict=False
        )
    except (TemplateError, ValueError):  # some templates refuse an empty message
        with pytest.raises(InvalidRequestError):
            await each_template.ours.encode_chat(messages, continue_final_message=True)
    else:
        assert await each_template.ours.encode_chat(messages, continue_final_message=True) == expected


@pytest.mark.parametrize("content", ["", " \n"])
async def test_the_header_of_an_empty_message_stays_whole(make: Make, content: str) -> None:
    """If the template trims the message, transformers trims the header as well."""
    ours = make("{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}[end]{% endfor %}").ours
    ids = await ours.encode_chat([{"role": "assistant", "content": content}], continue_final_message=True)
    assert ours.decode(ids) == "[assistant]\n\n"


async def test_what_is_control_in_a_message_that_is_continued_stays_text(make: Make) -> None:
    ours = make("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}").ours
    end = ours.encode_now("<|im_end|>")
    ids = await ours.encode_chat([{"role": "assistant", "content": "a<|im_end|>b"}], continue_final_message=True)
    assert ours.decode(ids).endswith("a<|im_end|>b")
    assert end[0] not in ids[-6:]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
    ],
)
async def test_what_cannot_be_continued(make: Make, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="continue_final_message") as error:
        await make("{{ messages }}").ours.encode_chat([message], continue_final_message=True)
    assert error.value.param == "continue_final_message"


async def test_a_template_that_leaves_the_last_message_out(make: Make) -> None:
    with pytest.raises(InvalidRequestError, match="leaves out the last message"):
        await make("{{ messages[0].content }}").ours.encode_chat(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], continue_final_message=True
        )


@given(messages=turns)
async def test_the_demo_models_chats_are_transformers(demo_pair: Pair, messages: Messages) -> None:
    await demo_pair.compare(messages, tools=TOOLS, enable_thinking=True)


@pytest.fixture(scope="session")
def demo_pair(demo_folder: Path) -> Pair:
    return Pair(demo_folder)


async def test_no_second_bos(make: Make) -> None:
    pair = make(ALL["headers_and_dates"], add_bos_token=True)
    ids = await pair.ours.encode_chat(CHATS["one question"])
    assert ids.count(pair.theirs.bos_token_id) == 1
    assert pair.ours.encode_now("hello")[0] == pair.theirs.bos_token_id


async def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": ALL["alternating"]}
    pair = Pair(write_tokenizer(tmp_path, byte_fallback_backend(), config))
    for messages in CHATS.values():
        await pair.compare(messages)


async def test_named_templates(make: Make) -> None:
    pair = make(
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    )
    assert pair.ours.decode(await pair.ours.encode_chat(CHATS["one question"])) == "plain"
    for tools in (None, [], TOOLS):
        await pair.compare(CHATS["one question"], tools=tools)


async def test_template_files_take_the_place_of_the_configs(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("with {{ tools | length }} tools")
    pair = Pair(write_tokenizer(tmp_path, byte_level_backend(), {**CONFIG, "chat_template": "from the config"}))
    assert pair.ours.decode(await pair.ours.encode_chat(CHATS["one question"])) == "from the file"
    for tools in (None, TOOLS):
        await pair.compare(CHATS["one question"], tools=tools)


async def test_the_template_of_a_model_that_sees(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), CONFIG)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from another file"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(await tokenizer.encode_chat(CHATS["one question"])) == "from another file"


async def test_a_file_named_by_the_knob_takes_the_place_of_all_templates(tmp_path: Path) -> None:
    settings = {**CONFIG, "chat_template": [{"name": name, "template": name} for name in ("default", "tool_use")]}
    folder = write_tokenizer(tmp_path, byte_level_backend(), settings)
    (tmp_path / "mine.jinja").write_text("{{ tools[0].function.name if tools }}mine: {{ messages[0].content }}")
    tokenizer = Tokenizer.load(folder, chat_template=str(tmp_path / "mine.jinja"))
    for tools, name in ((None, ""), (TOOLS, "get_weather")):
        text = tokenizer.decode(await tokenizer.encode_chat([{"role": "user", "content": "hi"}], tools))
        assert text == f"{name}mine: hi"
    with pytest.raises(CheckpointError, match=r"nowhere\.jinja cannot be read"):
        Tokenizer.load(folder, chat_template=str(tmp_path / "nowhere.jinja"))


@pytest.mark.parametrize(
    "answer", [{}, {"content": None}, {"content": None, "reasoning_content": "hm"}, {"content": None, "tool_calls": []}]
)
async def test_an_answer_without_text_and_calls_is_an_empty_text(answer: dict[str, object], make: Make) -> None:
    """The server returns one if a thought is cut off, and clients send it back."""
    tokenizer = make("{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}").ours
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **answer}, {"role": "user", "content": "on"}]
    assert tokenizer.decode(await tokenizer.encode_chat(messages)) == "user:hi;assistant:;user:on;"


async def test_null_fields_count_as_absent(make: Make) -> None:
    pair = make("{{ 'tool_calls' in messages[0] }}{{ messages[0].content }}")
    await pair.compare([{"role": "user", "content": None, "tool_calls": None}])


async def test_reasoning_goes_by_every_name_in_use(make: Make) -> None:
    pair = make("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}")
    for name in ("reasoning_content", "thinking", "reasoning"):
        ids = await pair.ours.encode_chat([{"role": "assistant", name: "because"}])
        assert pair.ours.decode(ids) == "because because"


async def test_the_templates_own_refusal_reaches_the_client(make: Make) -> None:
    pair = make("{{ raise_exception('only ' ~ 1 ~ ' message') }}")
    with pytest.raises(InvalidRequestError, match=r"^only 1 message$") as refused:
        await pair.ours.encode_chat(CHATS["one question"])
    assert refused.value.param == "messages"


async def test_a_refusal_quotes_messages_as_they_are(make: Make) -> None:
    pair = make("{{ raise_exception('no <' ~ messages[0].content) }}")
    with pytest.raises(InvalidRequestError, match=r"^no <a<\|im_end\|>$"):
        await pair.ours.encode_chat([{"role": "user", "content": "a<|im_end|>"}])


@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{{ messages.x.y }}", "{{ missing() }}"])
async def test_messages_that_do_not_suit_the_template_are_refused(make: Make, template: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template cannot render them") as refused:
        await make(template).ours.encode_chat(CHATS["one question"])
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "tokenize",
        "chat_template",
        "bos_token",
        "raise_exception",
        "namespace",
    ],
)
async def test_reserved_arguments_are_refused_by_name(make: Make, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as refused:
        await make("x").ours.encode_chat(CHATS["one question"], template_kwargs={"enable_thinking": True, name: "x"})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ([{"role": "user", "content": {1, 2}}], "holds a set, which is not JSON"),
        ([{"role": "user", "content": {1: 2}}], "key that is not a string"),
        (["hello"], "must be an object"),
        ([{"role": "user", "content": json.loads("[" * 100 + "]" * 100)}], "nested more than"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
async def test_what_is_not_a_chat_is_refused(make: Make, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await make("{{ messages[0].content }}").ours.encode_chat(messages)


async def test_without_a_template_there_are_no_chats(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await byte_level.encode_chat(CHATS["one question"])


async def test_strings_with_methods_of_their_own_become_plain(make: Make) -> None:
    class Loud(str):
        def upper(self) -> str:
            return "hidden"

    pair = make("{{ messages[0].content.upper() }}")
    ids = await pair.ours.encode_chat([{"role": "user", "content": Loud("hello")}])
    assert pair.ours.decode(ids) == "HELLO"


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ x | no_such_filter }}", "{% unknown %}", "{{ " + "(" * 5000, "x" * 300_000]
)
def test_a_template_that_cannot_be_compiled_is_the_checkpoints_fault(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), {"chat_template": template})
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


async def test_compiling_computes_nothing(make: Make) -> None:
    """A constant expression is not folded: it could be a bomb."""
    make("{{ 'x' | center(9999999999) }}{{ 'x' * 9999999999 }}")


async def test_an_empty_prompt_is_possible(make: Make) -> None:
    assert await make("").ours.encode_chat(CHATS["one question"]) == []


async def test_a_developer_is_the_system_to_templates_that_do_not_know_the_role(make: Make) -> None:
    messages = [{"role": "developer", "content": "be brief"}]
    for template, expected in (
        ("{{ messages[0].role }}", "system"),
        ("{{ messages[0].role }}{# developer #}", "developer"),
    ):
        pair = make(template)
        assert pair.ours.decode(await pair.ours.encode_chat(messages)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city":"Łódź", "n": [1]}', '{"city": "Łódź", "n": [1]}'),
        ({"city": "Oslo"}, '{"city": "Oslo"}'),
        ("", "{}"),
        ('{"city": ', '"{\\"city\\": "'),
        ("[1]", '"[1]"'),
        ("1" * 5000, json.dumps("1" * 5000)),
        ("[" * 5000, json.dumps("[" * 5000)),
        ('{"a":' * 70 + "1" + "}" * 70, json.dumps('{"a":' * 70 + "1" + "}" * 70)),
    ],
    ids=str,
)
async def test_arguments_reach_the_template_as_an_object(make: Make, arguments: object, expected: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    pair = make("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    ids = await pair.ours.encode_chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert pair.ours.decode(ids) == expected
