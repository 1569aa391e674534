"""Answers in channels, as gpt-oss writes them: their messages' headers and bodies."""
