"""Prompts cut to their last tokens, and the bound on the logprob candidates of an answer.

Candidates stay in memory until the answer is complete, at about 200 bytes each.
"""

from __future__ import annotations

import msgspec

from aengine.errors import InvalidRequestError
from aengine.http.engine_like import EngineLike, TokenizerLike
from aengine.requests.sampling_params import SamplingParams

Prompt = str | list[int]


async def keep_last_tokens(prompt: Prompt, last: int | None, tokenizer: TokenizerLike) -> Prompt:
    """Return the prompt's last `last` tokens. last: None keeps the whole prompt unchanged."""
    if last is None:
        return prompt
    ids = await tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return ids[-last:]


class CandidateBudget:
    """Counts the candidates of one answer to `prompts` prompts, and bounds them by `most`.

    copies: how many times the answer repeats the candidates of each prompt.
    streamed: candidates of outputs do not count, because a stream does not keep them.
    field: the field that asks for the prompts' candidates.
    Raises `InvalidRequestError` for parameters out of range.
    """

    def __init__(
        self,
        most: int,
        engine: EngineLike,
        params: SamplingParams,
        *,
        copies: int,
        streamed: bool,
        prompts: int = 1,
        field: str = "prompt_logprobs",
    ) -> None:
        self._most = most
        self._engine = engine
        self._params = params
        self._field = field
        self._per_prompt_token = 0 if params.prompt_logprobs is None else (params.prompt_logprobs + 1) * copies
        per_token = 0 if streamed or params.logprobs is None else params.logprobs + 1
        self._per_output_token = per_token * params.n * prompts
        self._prompt_tokens = 0
        if self._per_prompt_token or self._per_output_token:
            params.validate(engine.vocab_size)

    async def add(self, prompt: Prompt) -> tuple[Prompt, SamplingParams]:
        """Count one more prompt. Return the prompt, as ids if its length counts, and its parameters.

        If the request has no max_tokens, and the context would allow more candidates than the bound, max_tokens is set.
        Raises `InvalidRequestError` with the field, the number and the bound.
        """
        if self._per_prompt_token and isinstance(prompt, str):
            prompt = await self._engine.tokenizer.encode(prompt, context=self._engine.max_model_len)
        self._prompt_tokens += len(prompt) if isinstance(prompt, list) else 0
        return prompt, self._checked()

    def _checked(self) -> SamplingParams:
        params = self._params
        of_prompts = self._prompt_tokens * self._per_prompt_token
        of_outputs = min(params.max_tokens or 1, self._engine.max_model_len) * self._per_output_token
        if of_prompts + of_outputs > self._most:
            field = self._field if of_prompts > of_outputs else "logprobs"
            raise InvalidRequestError(
                f"{field} asks for {of_prompts + of_outputs} candidates ({of_prompts} for {self._prompt_tokens} prompt "
                f"tokens, {of_outputs} for outputs), but an answer may hold {self._most}: ask for fewer, for a smaller "
                "n, for fewer tokens or prompts at once, or raise the server's max_answer_candidates",
                field,
            )
        if params.max_tokens is None and self._per_output_token:
            longest = (self._most - of_prompts) // self._per_output_token
            if self._prompt_tokens + longest < self._engine.max_model_len:
                return msgspec.structs.replace(params, max_tokens=longest)
        return params
