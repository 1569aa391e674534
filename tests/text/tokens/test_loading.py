"""Reading a tokenizer from the files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from aengine.errors import CheckpointError
from aengine.requests.sampling_params import SamplingParams
from aengine.text.tokens.output import OutputText
from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.text_families import SPECIAL, byte_fallback_backend, byte_level_backend, write_tokenizer
from tests.text.tokens.texts import TEXTS

pytestmark = pytest.mark.anyio


def saved(folder: Path) -> dict[str, Any]:
    """Return a tokenizer.json as data, to be damaged."""
    write_tokenizer(folder, byte_level_backend())
    data: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return data


def test_nothing_but_tokenizer_json_is_needed(byte_level: Tokenizer) -> None:
    assert byte_level.eos_token_id is None
    assert byte_level.special_ids == {byte_level.encode_now(text)[0] for text in SPECIAL}
    assert max(map(max, map(byte_level.encode_now, TEXTS[3:]))) < byte_level.vocab_size


@pytest.mark.parametrize("value", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False, "special": True}])
def test_eos_as_text_or_object(tmp_path: Path, value: object) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level_backend(), {"eos_token": value}))
    assert tokenizer.eos_token_id == tokenizer.encode_now("<|im_end|>")[0]


def test_a_named_token_becomes_special(tmp_path: Path) -> None:
    backend = byte_level_backend()
    config = {"eos_token": "<think>", "additional_special_tokens": ["</think>"], "pad_token": "not in the vocabulary"}
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, config))
    assert tokenizer.decode(tokenizer.encode_now("a<think>b</think><tool_call>")) == "ab<tool_call>"
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_special_tokens_map_of_older_checkpoints(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), {})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert Tokenizer.load(tmp_path).eos_token_id is not None


def test_flags_in_tokenizer_config_win(tmp_path: Path) -> None:
    backend = byte_level_backend()
    think = backend.token_to_id("<think>")
    entry = {"content": "<think>", "special": True, "normalized": False}
    # the id is not the next one: it belongs to another vocabulary
    elsewhere = {"content": "<|im_end|>x", "special": True}
    config = {"added_tokens_decoder": {str(think): entry, "99999": elsewhere}}
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, config))
    assert think in tokenizer.special_ids
    assert tokenizer.vocab_size == backend.get_vocab_size()


def _with_markers(folder: Path, markers: list[str], around: tuple[str, ...]) -> str:
    """Return the text of an answer between each pair of markers. around: all tokens that a tokenizer also has."""
    backend = byte_level_backend()
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*markers, *around)])
    tokenizer = Tokenizer.load(write_tokenizer(folder, backend, {}))
    ids = []
    for begin, end, word in zip(markers[::2], markers[1::2], ("hello", "world")):
        ids += [backend.token_to_id(begin), *tokenizer.encode_now(word), backend.token_to_id(end)]
    output = OutputText(tokenizer, SamplingParams())
    text = "".join([*map(output.feed, ids), output.finish()])
    assert text == tokenizer.decode(ids)
    return text


def test_markers_around_an_answer_are_special_whatever_their_flag(tmp_path: Path) -> None:
    cohere = ["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"]
    assert _with_markers(tmp_path, cohere, ("<|START_OF_TURN_TOKEN|>",)) == "helloworld"


@pytest.mark.parametrize(("marker", "family"), [("answer", "[gMASK]"), ("response", "<|begin_of_sentence|>")])
def test_markers_that_may_mean_something_else_are_special_in_one_family(
    marker: str, family: str, tmp_path: Path
) -> None:
    markers = [f"<{marker}>", f"</{marker}>"]
    assert _with_markers(tmp_path, markers, (family,)) == "hello"
    assert _with_markers(tmp_path, markers, ()) == f"{markers[0]}hello{markers[1]}"


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": False, "add_eos_token": False}, {"add_bos_token": True}], ids=str
)
@pytest.mark.parametrize("bos", ["<s>", None])
def test_raw_prompts_give_transformers_ids(tmp_path: Path, flags: dict[str, object], bos: str | None) -> None:
    config = {"bos_token": bos, "eos_token": "</s>", **flags}
    backend = byte_fallback_backend()
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 1)])
    folder = write_tokenizer(tmp_path, backend, config)
    ours, theirs = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in [*TEXTS, "a</s><s>b"]:
        assert ours.encode_now(text) == theirs(text).input_ids


def test_bos_and_eos_that_only_the_config_asks_for(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_fallback_backend(), config))
    plain = byte_fallback_backend().encode("the end").ids
    assert tokenizer.encode_now("the end") == [1, *plain, 2]


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    backend = byte_level_backend()
    expected = [backend.encode(text).ids for text in TEXTS]
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend))
    assert list(map(tokenizer.encode_now, TEXTS)) == expected


def test_pieces_of_text_for_logprobs(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert byte_level.token_text(byte_level.encode_now("<|im_end|>")[0]) == "<|im_end|>"
    (lone,) = [i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == b"\xf0"]
    assert byte_level.token_text(lone) == "\ufffd"
    assert byte_fallback.token_text(byte_fallback.encode_now("the")[0]) == " the"


@pytest.mark.parametrize(
    "bytes_",
    [b"", b"{", b"null", b"[]", b'"text"', b"{}", b"\xff\xfe", b'{"normalizer": {"\xff": 1}}', b"[" * 100_000],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_not_what_it_should_be(tmp_path: Path, name: str, bytes_: bytes) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), {})
    (tmp_path / name).write_bytes(bytes_)
    if (name, bytes_) == ("tokenizer_config.json", b"{}"):
        Tokenizer.load(tmp_path)
        return
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(tmp_path)


def test_a_truncated_file(tmp_path: Path) -> None:
    text = json.dumps(saved(tmp_path))
    for share in (0.1, 0.5, 0.99):
        (tmp_path / "tokenizer.json").write_text(text[: int(len(text) * share)])
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "there is none, and no other kind is supported; put a tokenizer.json there"),
        ({"tekken.json": "{}"}, r"there is tekken\.json \(Mistral's tekken\); put"),
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": null}}'}, "is supported; put"),
        ({"tokenizer_config.json": '{"auto_map": ["AutoTokenizer"]}'}, "is supported; put"),
        (
            {
                "tiktoken.model": "IQ== 0",
                "tokenizer_config.json": json.dumps(
                    {
                        "tokenizer_class": "TikTokenTokenizer",
                        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
                    }
                ),
            },
            r"there is tiktoken\.model .*code in the repository \(tokenization_kimi\.TikTokenTokenizer, which "
            r"`trust_remote_code` would run elsewhere\), and such code is never run here; put a tokenizer\.json there",
        ),
    ],
)
def test_other_forms_of_a_tokenizer_are_refused_by_name(files: dict[str, str], why: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=why):
        Tokenizer.load(tmp_path)


WRONG_CONFIGS: list[dict[str, object]] = [
    {"eos_token": 7},
    {"eos_token": ""},
    {"eos_token": {"text": "x"}},
    {"add_bos_token": "yes"},
    {"added_tokens_decoder": [1]},
    {"added_tokens_decoder": {"x": {"content": "y"}}},
    {"added_tokens_decoder": {"-1": {"content": "y"}}},
    {"added_tokens_decoder": {"1": "y"}},
    {"added_tokens_decoder": {"1": {"content": "y", "special": "yes"}}},
    {"additional_special_tokens": "x"},
    {"additional_special_tokens": [None]},
    {"chat_template": 7},
    {"chat_template": [{"name": "default"}]},
    {"chat_template": ["x"]},
    {"a\x1b[2J_token": {"content": ""}},
]


@pytest.mark.parametrize("config", WRONG_CONFIGS, ids=str)
def test_wrong_types_in_tokenizer_config(tmp_path: Path, config: dict[str, object]) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), config)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json") as error:
        Tokenizer.load(tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", None),
        ("model", {"type": "BPE", "vocab": [], "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
        ("model", {"type": "BPE", "vocab": {}, "merges": []}),
        ("model", {"type": "Unheard"}),
        ("decoder", {"type": "Unheard"}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        ("added_tokens", [{"id": 1}]),
        ("added_tokens", 7),
    ],
    ids=str,
)
def test_wrong_values_in_tokenizer_json(tmp_path: Path, key: str, value: object) -> None:
    data = saved(tmp_path)
    data[key] = value
    if key == "model":
        data["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_ids_that_no_vocabulary_reaches(tmp_path: Path) -> None:
    data = saved(tmp_path)
    data["model"]["vocab"]["far"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has token ids up to 2147483648"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_is_not_complete_reads_its_vocabulary_when_it_is_needed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level_backend())
    tokenizer, whole = Tokenizer.begin_load(tmp_path), Tokenizer.load(tmp_path)
    ids = tokenizer.encode_now("a <think> é")
    assert tokenizer.decode(ids) == whole.decode(ids) == "a <think> é"
    assert tokenizer.vocab_size == whole.vocab_size


def test_completing_a_tokenizer_checks_its_ids(tmp_path: Path) -> None:
    data = saved(tmp_path)
    data["model"]["vocab"]["far"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.begin_load(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has token ids up to 2147483648"):
        tokenizer.complete()


def test_a_vocabulary_with_gaps_between_its_ids(tmp_path: Path) -> None:
    data = saved(tmp_path)
    data["model"]["vocab"]["far"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.token(5000), tokenizer.token(4999)) == (5001, "far", None)
    assert tokenizer.decode([4999, 5000]) == "far"


def test_tokens_beyond_the_models_vocabulary_are_read_and_never_looked_for(tmp_path: Path) -> None:
    template = "{{ tools }}<tool_call>{{ messages }}"
    write_tokenizer(tmp_path, byte_level_backend(), {"chat_template": template})
    whole = Tokenizer.load(tmp_path)
    call = whole.answer_format.markers["<tool_call>"]
    some = Tokenizer.load(tmp_path, vocab_size=call)
    assert some.encode_now("a<tool_call>") == whole.encode_now("a<tool_call>")
    assert "<tool_call>" not in some.answer_format.markers
