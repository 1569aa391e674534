"""Images of requests: which files are read, how large they may be, and how they become pixels."""
