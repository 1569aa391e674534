"""Fields that the requests of several APIs share: sampling, structured output, messages, tools, prompts."""
