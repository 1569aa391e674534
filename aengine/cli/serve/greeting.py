"""What `aengine serve` prints when it is ready: where it is, and what to type."""

from __future__ import annotations

from aengine.config import ServerConfig

_PROMPT = '{"prompt":"The capital of France is","max_tokens":20}'


def greeting(url: str, ready: str, server: ServerConfig) -> str:
    """The addresses of a server that is ready, and a command that asks it. ready: a sentence with the model's names."""
    key = ' -H "Authorization: Bearer $AENGINE_API_KEY"' if server.api_keys else ""
    addresses = [("OpenAI's clients", f"{url}/v1"), ("Anthropic's clients", url)]
    if server.page:
        addresses.append(("a page to chat on", f"{url}/"))
    lines = [f"  {what:<20}{address}" for what, address in addresses]
    command = f"  curl -N {url}/generate -d '{_PROMPT}'{key}"
    return "\n".join(["", f"Serving on {url} ({ready}; Ctrl-C stops)", "", *lines, command, ""])
