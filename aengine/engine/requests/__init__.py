"""One request: its arguments, the gate it passes, its choices while they live, the stream that its consumer reads."""
