"""How a reranker reads a query and a document: one behind the other, or within the words that it was trained with."""

from __future__ import annotations

from typing import Protocol

from aengine.errors import ConfigError, ContextLengthError, InvalidRequestError
from aengine.text.tokens.tokenizer import Tokenizer

# As Qwen3-Reranker's model card has it.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Pairs(Protocol):
    """The prompts of pairs."""

    async def encode(self, query: str, document: str, instruction: str | None, context: int) -> list[int]:
        """The ids of one pair, at most `context`. Raises `InvalidRequestError` and `ContextLengthError`."""
        ...


class PlainPairs:
    """The tokenizer's own way."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(self, query: str, document: str, instruction: str | None, context: int) -> list[int]:
        if instruction is not None:
            raise InvalidRequestError("instruction: this model reads a query and a document alone", "instruction")
        return await self._tokenizer.encode_pair(query, document, context, left=0)


class Qwen3Pairs:
    """Qwen3-Reranker's words. Special tokens within the texts are text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before, self._behind = (tokenizer.encode_now(text, False) for text in (_BEFORE, _BEHIND))

    async def encode(self, query: str, document: str, instruction: str | None, context: int) -> list[int]:
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        around = len(self._before) + len(self._behind)
        ids = await self._tokenizer.encode_literal(text, context, left=0)
        if len(ids) + around > context:
            raise ContextLengthError(
                f"This model's maximum context length is {context} tokens. However, {len(ids) + around} tokens are "
                "given as query and document, with the words around them",
                "prompt",
            )
        return [*self._before, *ids, *self._behind]


def yes_and_no(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens that a model answers with. Raises `ConfigError` where it has none."""
    yes, no = (tokenizer.token_id(word) for word in ("yes", "no"))
    if yes is None or no is None:
        raise ConfigError("rerank_template: the vocabulary lacks `yes` or `no` as a token; use none")
    return yes, no
