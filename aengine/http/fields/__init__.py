"""What the requests of all dialects share: fields, structured output, unknown fields, prompts."""
