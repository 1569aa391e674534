"""OpenAI's completions, chats and models: requests, encoders and endpoints."""
