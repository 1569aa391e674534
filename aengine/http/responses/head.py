"""The response object: what of it repeats the request, and what its answer adds."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

from aengine.http.bodies.responses_api.request import Reasoning, ResponsesRequest, TextConfig, TextFormat
from aengine.requests.sampling_params import SamplingParams
from aengine.types import FinishReason, Usage

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class Ending(NamedTuple):
    """The way an answer ended."""

    status: Status
    incomplete: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


def ending_of(reason: FinishReason | None) -> Ending:
    """The ending with this finish reason; None where the stream broke off."""
    match reason:
        case "stop":
            return Ending("completed")
        case "length":
            return Ending("incomplete", incomplete={"reason": "max_output_tokens"})
        case "abort" | None:
            return Ending("incomplete", incomplete={"reason": None})
        case "error":
            return Ending("failed", error={"code": "server_error", "message": "the answer could not be finished"})


class ResponseHead:
    """What stays the same of a response from its first event to its last."""

    def __init__(
        self, response_id: str, model: str, body: ResponsesRequest, params: SamplingParams, *, stored: bool
    ) -> None:
        text, reasoning = body.text or TextConfig(), body.reasoning or Reasoning()
        self.id = response_id
        self._begin: dict[str, Any] = {"id": response_id, "object": "response", "created_at": int(time.time())}
        self._end: dict[str, Any] = {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": stored,
            "temperature": params.temperature,
            "text": TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def body(self, ending: Ending, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        """The response as it stands."""
        return {
            **self._begin,
            "completed_at": int(time.time()) if ending.status == "completed" else None,
            "status": ending.status,
            "error": ending.error,
            "incomplete_details": ending.incomplete,
            "output": output,
            "usage": usage,
            **self._end,
        }


def usage_body(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """The `usage` of a response. Writing to the cache costs nothing, so that no token counts as written."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
