"""OpenAI's `/v1/responses`: input items to messages, answers to output items and events, and those that are kept."""
