"""OpenAI's completions, chats and models: their requests, encoders and endpoints."""
