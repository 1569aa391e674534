"""How a model scores pairs: by a classification head, by the logits of two tokens, or by comparing embeddings."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aengine.engine.pooling.vectors import probabilities
from aengine.errors import ConfigError, ContextLengthError, InvalidRequestError
from aengine.step_plan import Pool
from aengine.text.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:  # torch
    from aengine.model.config import ModelConfig
    from aengine.model.loading.pooling import PoolingConfig

QWEN3_RERANKER = "qwen3-reranker"  # in the names of its models

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


@dataclass(frozen=True, slots=True)
class Scorer:
    """A reranker: the prompts of pairs, what is taken of them, and what that means."""

    pairs: Pairs
    pool: Pool
    raw: bool = False  # the score is the logit

    def score(self, numbers: array[float]) -> float:
        """The score of one pair, by the logit of its only class, or those of `yes` and `no`."""
        if self.pool.kind == "tokens":
            return probabilities(numbers, independent=False)[0]
        return float(numbers[0]) if self.raw else probabilities(numbers, independent=True)[0]


def scorer_of(
    template: str, name: str, tokenizer: Tokenizer, model: ModelConfig, pooling: PoolingConfig
) -> Scorer | None:
    """The model's scorer; None: its embeddings are compared. template: as the knob; name: the model's.

    Raises `ConfigError` where the knob asks for what the model cannot do.
    """
    qwen3 = template == "qwen3" or (template == "auto" and QWEN3_RERANKER in name.lower())
    if model.head == "classes":
        pairs: Pairs = Qwen3Pairs(tokenizer) if qwen3 else PlainPairs(tokenizer)
        return Scorer(pairs, Pool("classes"), pooling.raw) if model.labels == 1 else None
    if not qwen3:
        return None
    if model.head != "vocabulary":
        raise ConfigError("rerank_template: the model has no output matrix to say yes or no with; use none")
    yes, no = pooling.yes_no or yes_and_no(tokenizer)
    return Scorer(Qwen3Pairs(tokenizer), Pool("tokens", (yes, no)))


def refuse_scores(model: ModelConfig, pooling: PoolingConfig) -> None:
    """Raise `InvalidRequestError` for a model that has no `Scorer` although it is not made for embeddings either."""
    if pooling.yes_no is not None:
        raise InvalidRequestError(
            "the model answers by two tokens, but the words that it reads around a query and a document are not known; "
            "if they are Qwen3-Reranker's, set the engine's rerank_template to qwen3",
            "model",
        )
    if model.head == "classes" and model.labels != 1:
        raise InvalidRequestError(
            f"the model tells {model.labels} classes apart: a score needs a head with one; ask /classify", "model"
        )
