"""Makes sequences for the scheduler. Refuses requests that the model cannot serve or that exceed its context."""

from __future__ import annotations

import secrets
from array import array
from typing import TYPE_CHECKING

from msgspec.structs import replace

from aengine.cache.radix import Namespace, packed
from aengine.errors import ContextLengthError, InvalidRequestError
from aengine.prompt_images import PromptImages
from aengine.requests.sampling_params import SamplingParams, check_token_ids
from aengine.scheduling.sequence import LoadedAdapter
from aengine.scheduling.sequence import Sequence as TokenSequence
from aengine.step_plan import Pool

if TYPE_CHECKING:  # torch
    from aengine.model.config import ModelConfig

_UNUSED_PARAMS = SamplingParams()  # for pooled prompts, which draw no tokens


class Sequences:
    """Makes sequences for one loaded model."""

    def __init__(self, model: ModelConfig, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids

    def for_generation(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        constrained: bool,
        banned: tuple[tuple[int, ...], ...],
        rank: tuple[float, int],
        salt: str | None,
        adapter: LoadedAdapter | None,
        images: PromptImages | None,
    ) -> TokenSequence:
        """Return the sequence of a request's first choice. The other choices fork from it.

        constrained: whether the output has a grammar. The output then ends with an end token even if ignore_eos is set.
        banned: sequences of token ids that the output may not contain.
        rank: the sort key in the queue.
        salt: requests with different salts share no cached prefix.
        images: the images among the ids, with their keys.

        Raises `InvalidRequestError`, or `ContextLengthError` if the request does not fit the context.
        """
        if self._model.head != "vocabulary":
            raise InvalidRequestError(
                "the model has no output matrix and generates nothing: it gives embeddings, scores or classes", "model"
            )
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        max_total = self._max_total(
            len(token_ids), params
        )  # before the check of the ids, which is slow for millions of ids
        check_token_ids(token_ids, self._model.vocab_size, "prompt")
        near = self._is_near(max_total)
        ends = constrained or not params.ignore_eos
        prompt = packed(token_ids)
        return TokenSequence(
            prompt=prompt,
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            stop_ids=(self._eos_token_ids if ends else ()) + params.stop_token_ids,
            max_total=max_total,
            rank=rank,
            salt=_namespace(salt, adapter, near),
            adapter=adapter,
            near=near,
            banned=banned,
            siblings=params.n - 1,
            speculates=params.speculation,
            images=images,
            prompt_keys=None if images is None else _with_keys(prompt, images),
        )

    def pooled_prompt(self, token_ids: list[int]) -> array[int]:
        """Check a prompt that is pooled, and return its ids for `for_pooling`. Raises as `for_generation` does."""
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        context = self._max_model_len
        if len(token_ids) > context:
            raise ContextLengthError(f"{_maximum(context)} However, {len(token_ids)} tokens are given", "prompt")
        check_token_ids(token_ids, self._model.vocab_size, "prompt")
        return packed(token_ids)

    def for_pooling(
        self,
        prompt: array[int],
        pool: Pool,
        *,
        rank: tuple[float, int],
        salt: str | None,
        adapter: LoadedAdapter | None,
    ) -> TokenSequence:
        """Return the sequence of a prompt that `pooled_prompt` returned."""
        near = self._is_near(len(prompt))
        return TokenSequence(
            prompt=prompt,
            params=_UNUSED_PARAMS,
            seed=0,
            stop_ids=(),
            max_total=len(prompt) + 1,  # the pooled vector counts as a draw
            rank=rank,
            salt=_namespace(salt, adapter, near),
            adapter=adapter,
            near=near,
            pool=pool,
        )

    def within_context(self, prompt_len: int, params: SamplingParams) -> SamplingParams:
        """Return the parameters with max_tokens reduced so that prompt and output fit the context."""
        if params.max_tokens is None:
            return params
        most = max(1, self._max_model_len - prompt_len)
        return replace(params, max_tokens=min(params.max_tokens, most))

    def _is_near(self, max_total: int) -> bool:
        """Return whether a sequence of at most `max_total` tokens stays in the trained context.

        Always True for models whose rotary factors do not depend on the length.
        """
        return not self._model.near_positions or max_total <= self._model.near_positions

    def _max_total(self, prompt_len: int, params: SamplingParams) -> int:
        context = self._max_model_len
        if prompt_len >= context:
            raise ContextLengthError(
                f"{_maximum(context)} However, {prompt_len} tokens are given as prompt, and at least one must be left",
                "prompt",
            )
        if params.max_tokens is None:
            return context
        if prompt_len + params.max_tokens > context:
            raise ContextLengthError(
                f"{_maximum(context)} However, {prompt_len} tokens are given as prompt and max_tokens is "
                f"{params.max_tokens}, together {prompt_len + params.max_tokens}",
                "max_tokens",
            )
        return prompt_len + params.max_tokens


def _with_keys(prompt: array[int], images: PromptImages) -> array[int]:
    """Return the ids of a prompt with the key of each image in place of its ids."""
    keys = prompt[:]
    for image in images.images:
        if image.end > len(prompt):
            raise InvalidRequestError("images: do not belong to these token ids; use those of encode_chat", "prompt")
        keys[image.start : image.end] = packed([image.key]) * (image.end - image.start)
    return keys


def _namespace(salt: str | None, adapter: LoadedAdapter | None, near: bool) -> Namespace:
    """Return the cache namespace of a request. It depends on the salt, the adapter and the rotary factors."""
    if near and adapter is None:
        return salt
    number = 0 if adapter is None else adapter.generation
    return (number if near else -number, salt)


def _maximum(context: int) -> str:
    """Return the first sentence of context errors. It is OpenAI's, because clients recognise the error by it."""
    return f"This model's maximum context length is {context} tokens."
