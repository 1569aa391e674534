"""The first steps of every request: its id, checks of host, origin and API key, reading its body, and errors."""
