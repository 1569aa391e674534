"""Requests with the fields that Codex 0.169 and Claude Code 2.1 send, as recorded. The texts are our own."""

from __future__ import annotations

import json
from typing import Any

CODEX_HEADERS = {
    "accept": "text/event-stream",
    "originator": "codex_exec",
    "user-agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.169.0)",
    "x-codex-beta-features": "remote_compaction_v2",
    "x-codex-window-id": "01a2:0",
    "x-codex-turn-metadata": json.dumps({"session_id": "01a2", "request_kind": "turn", "sandbox": "seccomp"}),
    "x-client-request-id": "01a2",
    "session-id": "01a2",
    "thread-id": "01a2",
}
CLAUDE_HEADERS = {
    "accept": "application/json",
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,thinking-token-count-2026-05-13,"
    "context-management-2025-06-27,prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "x-api-key": "any",
    "x-app": "cli",
    "x-claude-code-session-id": "d8ee",
    "x-stainless-lang": "js",
    "x-stainless-timeout": "600",
}


def parameters(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _codex_function(name: str, *required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": f"What {name} does.",
        "strict": False,
        "parameters": parameters(*required, **properties),
    }


def _said(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}


def codex_request(*more: dict[str, Any]) -> dict[str, Any]:
    """A turn of Codex. more: the items of the answer, as Codex sends them back, and its tools' outputs."""
    return {
        "model": "fake",
        "stream": True,
        "input": [
            _said("developer", "You are an agent that works on code."),
            _said("developer", "<skills>none</skills>", "<permissions>read only</permissions>"),
            _said("user", "<environment>a folder</environment>"),
            _said("user", "What is 17 + 25?"),
            *more,
        ],
        "tools": [
            _codex_function(
                "exec_command",
                "cmd",
                cmd={"type": "string"},
                login={"type": "boolean"},
                max_output_tokens={"type": "number"},
                prefix_rule={"type": "array", "items": {"type": "string"}},
            ),
            _codex_function("get_goal"),
            {
                "type": "namespace",
                "name": "multi_agent_v1",
                "description": "Other agents.",
                "tools": [_codex_function("close_agent", "target", target={"type": "string"})],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2",
        "client_metadata": {"session_id": "01a2", "x-codex-installation-id": "a66a", "turn_id": "01a3"},
    }


def claude_request(*more: dict[str, Any]) -> dict[str, Any]:
    """A turn of Claude Code. more: the messages after the user's."""
    cached = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": "fake",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nThe date.\n</system-reminder>"},
                    {"type": "text", "text": "What is 17 + 25?"},
                ],
            },
            {"role": "system", "content": "Kinds of agents: one."},
            *more,
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.84c; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": "\nYou work on code.", **cached},
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "Runs a command.",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    **parameters("command", command={"type": "string"}, timeout={"type": "number"}),
                },
            }
        ],
        "metadata": {"user_id": json.dumps({"device_id": "d80f", "account_uuid": "", "session_id": "d8ee"})},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
