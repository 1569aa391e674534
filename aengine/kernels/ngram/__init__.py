"""N-gram drafts: the tokens that followed the latest earlier occurrence of a row's last tokens."""
