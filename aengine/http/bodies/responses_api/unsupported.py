"""What `/v1/responses` calls by other names than the other endpoints do, and OpenAI's fields of it that are refused."""

from __future__ import annotations

from collections.abc import Mapping

from aengine.http.bodies.refusal import Unsupported

REFUSED_IN_RESPONSES: Mapping[str, Unsupported] = {
    # OpenAI's
    "background": Unsupported("answers are given while the request lasts; stream them", (False,)),
    "background_options": Unsupported("answers are given while the request lasts; stream them", ({},)),
    "conversation": Unsupported("conversations are not kept here; send their items as input"),
    "prompt": Unsupported("prompt templates are not kept here; send instructions and input"),
    "context_management": Unsupported("nothing is compacted here; leave items out of input", ([],)),
    "image": Unsupported("only text is read and written here", ({},)),
    "access_programs": Unsupported("not supported", ({},)),
    # the other endpoints'
    "messages": Unsupported("it is called input here"),
    "max_tokens": Unsupported("it is called max_output_tokens here"),
    "max_completion_tokens": Unsupported("it is called max_output_tokens here"),
    "response_format": Unsupported("send text with format in it", ({"type": "text"},)),
    "reasoning_effort": Unsupported("send reasoning with effort in it"),
    "logprobs": Unsupported("send include with message.output_text.logprobs, and top_logprobs", (False,)),
    "n": Unsupported("a response is one; send the request several times", (1,)),
}
