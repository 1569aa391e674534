"""OpenAI's dialect: chunks, logprobs, tools, and how an answer is read."""
