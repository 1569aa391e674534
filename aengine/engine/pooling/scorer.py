"""How a model scores pairs: by a classification head, by the logits of two tokens, or by comparing embeddings."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aengine.engine.pooling.pairs import Pairs, PlainPairs, Qwen3Pairs, yes_and_no
from aengine.engine.pooling.vectors import probabilities
from aengine.errors import ConfigError, InvalidRequestError
from aengine.step_plan import Pool
from aengine.text.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:  # torch
    from aengine.model.config import ModelConfig
    from aengine.model.loading.pooling import PoolingConfig

QWEN3_RERANKER = "qwen3-reranker"  # in the names of its models


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
