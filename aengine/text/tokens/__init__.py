"""Tokenization: tokenizer, detokenizer, stop strings, bad words."""
