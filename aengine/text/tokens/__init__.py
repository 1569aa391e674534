"""Text to ids and ids to text: tokenizer, detokenizer, stop strings, bad words."""
