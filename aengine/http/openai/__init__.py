"""OpenAI's formats: chunks, logprobs, tools, and parsing of answers."""
