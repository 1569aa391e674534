"""Lesson 5: text. Ids become text piece by piece, never half a character. The joined pieces are the whole text.

Read: aengine/text/tokens/tokenizer.py, aengine/text/tokens/detokenizer.py, aengine/text/tokens/output.py.
"""

from __future__ import annotations

import pytest

from aengine.requests.sampling_params import SamplingParams
from aengine.text.tokens.detokenizer import Detokenizer
from aengine.text.tokens.output import OutputText
from aengine.text.tokens.tokenizer import Tokenizer
from tests.lessons.conftest import PROMPT, Reference


def test_the_prompt_and_the_output_read_as_transformers_reads_them(tokenizer: Tokenizer, reference: Reference) -> None:
    assert tokenizer.encode_now(PROMPT) == reference.prompt_ids
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.feed(token_id) for token_id in reference.output_ids]
    assert "".join(pieces) + detokenizer.flush() == reference.text


@pytest.mark.parametrize("text", ["naïve café", "你好，世界", "👋🏽 hi 👩‍👩‍👧", "e\u0301 combined"])
def test_no_piece_is_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.feed(token_id) for token_id in tokenizer.encode_now(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(tokenizer.encode_now(text))


def test_a_stop_string_across_tokens_ends_the_text_before_it(tokenizer: Tokenizer, reference: Reference) -> None:
    stop = reference.text[3:9]
    output = OutputText(tokenizer, SamplingParams(stop=(stop,)), reference.prompt_ids)
    text = ""
    for token_id in reference.output_ids:
        text += output.feed(token_id)
        if output.stop_string is not None:
            break
    assert output.stop_string == stop
    assert text == reference.text[: reference.text.index(stop)]
