"""Standard streams of a server process, which neither raise nor block."""
