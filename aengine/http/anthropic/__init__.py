"""Anthropic's formats: messages of content blocks to prompts, tools, and answers as blocks and events."""
