"""Matchers and masks allow what the grammar and the tokenizer allow together."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from aengine.errors import InvalidRequestError
from aengine.requests.structured import Structured
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.parser import AnswerFormat
from aengine.text.grammar.calls import CallGrammar
from aengine.text.grammar.grammars import MAX_CACHED, Grammars, Matcher
from aengine.text.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

HERMES = FORMATS["hermes"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def demo() -> Tokenizer:
    from aengine.model.loading.hub import resolve_model

    return Tokenizer.load(resolve_model(None, None))


@pytest.fixture
def grammars(demo: Tokenizer) -> Iterator[Grammars]:
    """Return grammars for the demo model, as if its vocabulary had 37 more ids than the tokenizer."""
    grammars = Grammars(demo, demo.vocab_size + 37, (4091, 4089))
    yield grammars
    grammars.close()


def tokens_of(mask: NDArray[np.int32]) -> list[int]:
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()


async def walk(grammars: Grammars, matcher: Matcher, seed: int, limit: int = 400) -> list[int]:
    """Draw an output from the masks alone, without its end; fails if it does not end."""
    rng = random.Random(seed)
    output: list[int] = []
    while len(output) < limit:
        (mask,) = (await grammars.fill([matcher])).bits
        assert matcher.error is None
        token = rng.choice(tokens_of(mask))
        if token in grammars.eos_ids:
            return output
        output.append(token)
        matcher.accept(token)
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("structured", "check"),
    [
        (Structured(json=PERSON), lambda text: jsonschema.validate(json.loads(text), PERSON)),
        (Structured(json=json.dumps(PERSON)), lambda text: jsonschema.validate(json.loads(text), PERSON)),
        (Structured(json_object=True), lambda text: json.loads(text).items()),
        (Structured(regex=r"[a-c]{2,4}/\d{1,3}"), lambda text: re.fullmatch(r"[a-c]{2,4}/\d{1,3}", text).group()),
        (Structured(regex="^a\nb{1,3}$"), lambda text: re.fullmatch("a\nb{1,3}", text).group()),
        (Structured(grammar='start: "x" a~3\na: /[0-9]/ | "é"'), lambda text: re.match("x([0-9]|é){3}$", text).group()),
        (Structured(grammar='start: "<" %json {"type": "null"}'), lambda text: {"<null"}.remove(text)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
async def test_whatever_the_masks_allow_is_in_the_language(
    grammars: Grammars, demo: Tokenizer, structured: Structured, check: object, seed: int
) -> None:
    limit = 3000 if structured.json_object else 400
    try:
        output = await walk(grammars, await grammars.matcher(structured), seed, limit)
    except AssertionError:
        if structured.json_object:  # the length of such an object has no bound
            return
        raise
    check(demo.decode(output))  # type: ignore[operator]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ({"json": PERSON}, '{"name": "Bo", "age": 7}'),
        ({"json_object": True}, '{"a": [1]}'),
        ({"regex": "[a-z]+"}, "yes"),
        ({"choice": ("no", "<think>")}, "no"),
        ({"grammar": 'start: "x" answer\nanswer: /[0-9]+/\nthought: "t"'}, "x12"),
    ],
    ids=["json", "json_object", "regex", "choice", "grammar"],
)
async def test_a_thought_may_come_before_every_form(
    demo: Tokenizer, form: dict[str, object], answer: str, tokens: bool
) -> None:
    if not tokens:  # in some tokenizers the markers are ordinary text
        demo.answer_format = AnswerFormat()
    grammars = Grammars(demo, demo.vocab_size, (4091,))
    thought = 'so {"name": no</thin\n>\n'
    whole, opened = f"<think>\n{thought}</think>\n\n{answer}", f"{thought}</think>{answer}"
    for state, good, bad in (
        ("never", [answer], [whole, opened]),
        ("possible", [answer, whole], [opened, f"<think>{thought}", f"</think>{answer}", f"{whole}</think>"]),
        ("open", [opened, whole], [answer, thought, f"{opened}</think>", f"</think>\n\n\n{answer}"]),
    ):
        for text in (*good, *bad):
            matcher = await grammars.matcher(Structured(**form, thought=state))  # type: ignore[arg-type]
            fits = all([await takes(grammars, matcher, token) for token in [*demo.encode_now(text), 4091]])
            assert fits == (text in good), (state, text)
    grammars.close()


@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"(.|\n){1,9}"},
        {"regex": "[^0]+"},
        {"grammar": r'start: /(.|\n)+/ "!"?'},
        {"choice": ("<think>0", "a")},
    ],
    ids=str,
)
async def test_a_thought_is_none_of_the_form(grammars: Grammars, demo: Tokenizer, form: dict[str, object]) -> None:
    matcher = await grammars.matcher(Structured(**form, thought="possible"))  # type: ignore[arg-type]
    for token in demo.encode_now("<think>a long 0 thought</think>"):
        (mask,) = (await grammars.fill([matcher])).bits
        assert 4091 not in tokens_of(mask)
        assert await takes(grammars, matcher, token)
    assert await takes(grammars, matcher, demo.encode_now("a")[0])
    assert await takes(grammars, matcher, 4091)


@pytest.mark.parametrize("thought", ["never", "possible"])
async def test_calls_may_take_the_place_of_every_form(grammars: Grammars, demo: Tokenizer, thought: str) -> None:
    calls = CallGrammar([CallableTool("f"), CallableTool("g")], HERMES, tokens=demo.answer_format.markers).rules()
    first = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    whole = f"{first}\n{first.replace('f', 'g')}"
    begun = "<think>x</think>\n\n" if thought == "possible" else ""
    for form, answer in (({"json": PERSON}, '{"name": "Bo", "age": 7}'), ({"regex": "[a-z]+"}, "yes")):
        good, bad = [first, whole, answer], [f"{answer}\n{first}", f"a{first}", first.replace("f", "h")]
        for text in (*good, *bad):
            matcher = await grammars.matcher(Structured(**form, thought=thought, calls=calls))  # type: ignore[arg-type]
            fits = all([await takes(grammars, matcher, token) for token in [*demo.encode_now(begun + text), 4091]])
            assert fits == (text in good), text


@pytest.mark.parametrize(
    ("schema", "words"), [({"multipleOf": 100_000_000}, "states"), ({"description": "x" * 200_000}, "characters")]
)
async def test_calls_in_a_forms_place_are_bounded_as_well(
    grammars: Grammars, schema: dict[str, object], words: str
) -> None:
    parameters = {"properties": {"a": {"type": "integer", **schema}}}
    calls = CallGrammar([CallableTool("f", parameters, strict=True)], HERMES).rules()
    with pytest.raises(InvalidRequestError, match=words):
        await grammars.matcher(Structured(json_object=True, calls=calls))


async def takes(grammars: Grammars, matcher: Matcher, token: int) -> bool:
    """Return whether this token may come next; if so, accept it."""
    (mask,) = (await grammars.fill([matcher])).bits
    if matcher.error is not None or token not in tokens_of(mask):
        return False
    matcher.accept(token)
    return True


async def test_an_error_behind_a_thought_is_the_forms(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequestError, match='unknown name: "foo"') as caught:
        await grammars.matcher(Structured(grammar="start: foo", thought="possible"))
    assert caught.value.param == "structured.grammar"


async def test_choices_are_taken_literally(grammars: Grammars, demo: Tokenizer) -> None:
    choices = (
        "a\nb",
        'quo"te',
        "back\\slash",
        "\t",
        "\0",
        "é日本",
        "/a/",
        "a",
        "ab",
        "{x}",
        "$",
        "\x7f",
        "\u200b",
        "😀",
    )
    structured = Structured(choice=choices)
    found = {demo.decode(await walk(grammars, await grammars.matcher(structured), seed)) for seed in range(150)}
    assert found == set(choices)


async def test_the_end_is_allowed_exactly_where_the_grammar_can_end(grammars: Grammars, demo: Tokenizer) -> None:
    matcher = await grammars.matcher(Structured(regex="ab?"))
    ends = []
    for text in ("a", "b"):
        (mask,) = (await grammars.fill([matcher])).bits
        ends.append({4091, 4089} <= set(tokens_of(mask)))
        assert not matcher.stopped
        matcher.accept(demo.encode_now(text)[0])
    (mask,) = (await grammars.fill([matcher])).bits
    assert ends == [False, True]
    assert tokens_of(mask) == [4089, 4091]  # both end tokens and nothing else
    assert matcher.stopped
    assert matcher.error is None


@pytest.mark.parametrize("eos", [4091, 4089])
async def test_every_end_token_ends_the_grammar(grammars: Grammars, demo: Tokenizer, eos: int) -> None:
    matcher = await grammars.matcher(Structured(regex="a+"))
    matcher.accept(demo.encode_now("a")[0])
    matcher.accept(eos)
    assert matcher.stopped
    assert matcher.error is None


async def test_special_tokens_and_ids_without_a_token_are_never_allowed(grammars: Grammars, demo: Tokenizer) -> None:
    matcher = await grammars.matcher(Structured(regex=r"(.|\n)+"))
    (mask,) = (await grammars.fill([matcher])).bits
    assert len(mask) == grammars.words == -(-(demo.vocab_size + 37) // 32)
    allowed = set(tokens_of(mask))
    assert len(allowed) > 3000
    assert allowed.isdisjoint(demo.special_ids)
    assert max(allowed) < demo.vocab_size


async def test_copies_are_independent(grammars: Grammars, demo: Tokenizer) -> None:
    a, b, c = (demo.encode_now(letter)[0] for letter in "abc")
    matcher = await grammars.matcher(Structured(regex="abc|acb"))
    matcher.accept(a)
    twin = matcher.copy()
    matcher.accept(b)
    twin.accept(c)
    masks = (await grammars.fill([matcher, twin])).bits
    assert [c in tokens_of(mask) for mask in masks] == [True, False]
    assert [b in tokens_of(mask) for mask in masks] == [False, True]


async def test_rows_without_a_matcher_allow_everything(grammars: Grammars) -> None:
    matcher = await grammars.matcher(Structured(choice=("a",)))
    masks = (await grammars.fill([None, matcher, None])).bits
    assert (masks[0] == -1).all()
    assert (masks[2] == -1).all()
    assert len(tokens_of(masks[1])) == 1
    assert (await grammars.fill([])).bits.shape == (0, grammars.words)


async def test_a_token_that_the_grammar_forbids_is_an_error(grammars: Grammars, demo: Tokenizer) -> None:
    structured = Structured(choice=("yes", "no"))
    matcher = await grammars.matcher(structured)
    matcher.accept(demo.encode_now("x")[0])
    await grammars.fill([matcher])
    assert matcher.error
    other = await grammars.matcher(structured)
    await grammars.fill([other])
    assert other.error is None


async def test_a_grammar_that_became_too_large_is_compiled_afresh(grammars: Grammars, demo: Tokenizer) -> None:
    """All its users share its automaton, which grows with their outputs."""
    structured = Structured(regex=r"[\w\d\p{L}]{1,500}" * 50)
    matcher = await grammars.matcher(structured)
    for token in demo.encode_now("supercalifragilisticexpialidocious" * 9):
        await grammars.fill([matcher])
        matcher.accept(token)
    await grammars.fill([matcher])
    assert matcher.error
    again = await grammars.matcher(structured)
    await grammars.fill([again])
    assert again.error is None


async def test_compiled_grammars_are_kept_within_a_bound(grammars: Grammars) -> None:
    first = await grammars.matcher(Structured(regex="a"))
    compiled = grammars._cached[first.source]
    await grammars.matcher(Structured(regex="a", origin="elsewhere"))
    assert grammars._cached[first.source] is compiled
    for number in range(MAX_CACHED):
        await grammars.matcher(Structured(regex=f"a{{{number}}}b"))
    assert len(grammars._cached) == MAX_CACHED
    assert first.source not in grammars._cached


async def test_without_an_end_token_nothing_is_structured(demo: Tokenizer) -> None:
    grammars = Grammars(demo, demo.vocab_size, ())
    with pytest.raises(InvalidRequestError, match="no end-of-sequence token") as caught:
        await grammars.matcher(Structured(regex="a"))
    assert caught.value.param == "structured.regex"
    grammars.close()


async def test_every_tokenizer_family(any_tokenizer: Tokenizer) -> None:
    """The masks follow the bytes that each token adds to a text. Without such bytes, nothing is structured."""
    grammars = Grammars(any_tokenizer, any_tokenizer.vocab_size, (any_tokenizer.vocab_size - 1,))
    pattern = "[a-z]{1,9}( [a-z]{1,4}){2}"
    if any_tokenizer.pieces is None:
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            await grammars.matcher(Structured(regex=pattern))
        return
    for seed in range(5):
        output = await walk(grammars, await grammars.matcher(Structured(regex=pattern)), seed)
        assert re.fullmatch(pattern, b"".join(map(any_tokenizer.token_bytes, output)).decode())
    grammars.close()


async def test_a_grammar_may_say_that_it_has_no_options(grammars: Grammars, demo: Tokenizer) -> None:
    """guidance writes its grammars with an empty list of options."""
    matcher = await grammars.matcher(Structured(grammar='%llguidance {}\n\nstart: x\nx[capture]: X\n\nX: "yes"\n'))
    for token in demo.encode_now("yes"):
        assert await takes(grammars, matcher, token)
    (mask,) = (await grammars.fill([matcher])).bits
    assert tokens_of(mask) == [4089, 4091]  # the end tokens
