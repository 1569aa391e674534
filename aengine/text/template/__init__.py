"""Renders chats to text: chat templates, their sandbox and its budget, control tokens."""
