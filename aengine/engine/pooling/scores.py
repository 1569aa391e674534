"""Turns pooled numbers into embeddings, probabilities and scores, in float64.

A pair is scored by a classification head, by the logits of two tokens, or by comparing embeddings.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from aengine.errors import ConfigError, ContextLengthError, InvalidRequestError
from aengine.step_plan import Pool
from aengine.text.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:  # torch
    from aengine.model.config import ModelConfig
    from aengine.model.loading.pooling import PoolingConfig

_LEAST_NORM = 1e-12  # as in torch's normalize; a zero vector stays zero
QWEN3_RERANKER = "qwen3-reranker"  # its models have this in their names

# The prompt of Qwen3-Reranker's model card.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Pairs(Protocol):
    """Makes the prompts of query-document pairs."""

    async def encode(self, query: str, document: str, instruction: str | None, context: int) -> list[int]:
        """Return the token ids of one pair. Raises `InvalidRequestError`, and `ContextLengthError` above `context`."""
        ...


class PlainPairs:
    """`Pairs` for classifiers: the tokenizer joins query and document."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(self, query: str, document: str, instruction: str | None, context: int) -> list[int]:
        if instruction is not None:
            raise InvalidRequestError("instruction: this model reads a query and a document alone", "instruction")
        return await self._tokenizer.encode_pair(query, document, context, left=0)


class Qwen3Pairs:
    """`Pairs` in the prompt format of Qwen3-Reranker. Special tokens in the texts are read as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = (tokenizer.encode_now(text, False) for text in (_BEFORE, _AFTER))

    async def encode(self, query: str, document: str, instruction: str | None, context: int) -> list[int]:
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        around = len(self._before) + len(self._after)
        ids = await self._tokenizer.encode_literal(text, context, left=0)
        if len(ids) + around > context:
            raise ContextLengthError(
                f"This model's maximum context length is {context} tokens. However, {len(ids) + around} tokens are "
                "given as query and document, with the words around them",
                "prompt",
            )
        return [*self._before, *ids, *self._after]


def yes_and_no(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the tokens of `yes` and `no`. Raises `ConfigError` if the vocabulary lacks one."""
    yes, no = (tokenizer.token_id(word) for word in ("yes", "no"))
    if yes is None or no is None:
        raise ConfigError("rerank_template: the vocabulary lacks `yes` or `no` as a token; use none")
    return yes, no


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores pairs with a reranker: makes their prompts, says how to pool them, and turns the results into scores."""

    pairs: Pairs
    pool: Pool
    raw: bool = False  # whether the score is the logit itself

    def score(self, numbers: array[float]) -> float:
        """Return the score of one pair from the logit of the only class, or from the logits of `yes` and `no`."""
        if self.pool.kind == "tokens":
            return probabilities(numbers, independent=False)[0]
        return float(numbers[0]) if self.raw else probabilities(numbers, independent=True)[0]


def make_scorer(
    template: str, name: str, tokenizer: Tokenizer, model: ModelConfig, pooling: PoolingConfig
) -> Scorer | None:
    """Return the model's scorer. None means that the score is the cosine of embeddings.

    template: the knob rerank_template. name: the model's id or path.

    Raises `ConfigError` if the model cannot score as the knob says.
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
    """Raise `InvalidRequestError` if embeddings of a model without a `Scorer` cannot be compared either."""
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


def vector_of(chunks: Sequence[array[float]], tokens: int, mean: bool) -> NDArray[np.float64]:
    """Return the vector [hidden] of a prompt: the sum over its chunks, divided by its tokens for a mean."""
    total = np.sum([np.asarray(chunk, dtype=np.float64) for chunk in chunks], axis=0)
    vector: NDArray[np.float64] = total / tokens if mean else total
    return vector


def embedding_of(vector: NDArray[np.float64], dimensions: int | None, normalize: bool) -> array[float]:
    """Return the first `dimensions` numbers of a vector, or all for None. normalize: scale them to length 1."""
    vector = vector[:dimensions]
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), _LEAST_NORM)
    return array("f", vector.astype(np.float32).tobytes())


def cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the cosine of the angle between two vectors."""
    lengths = max(float(np.linalg.norm(one)), _LEAST_NORM) * max(float(np.linalg.norm(other)), _LEAST_NORM)
    return float(one @ other) / lengths


def probabilities(logits: Sequence[float], independent: bool) -> tuple[float, ...]:
    """Return the probability of each class. Unless classes are independent, they add up to 1."""
    values = np.asarray(logits, dtype=np.float64)
    if independent:
        found = np.exp(-np.logaddexp(0.0, -values))
    else:
        shifted = np.exp(values - values.max())
        found = shifted / shifted.sum()
    return tuple(found.tolist())
