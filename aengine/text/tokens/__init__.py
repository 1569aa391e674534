"""The tokenizer, the detokenizer, stop strings and bad words."""
