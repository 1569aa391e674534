"""A request in the engine: its arguments, its sequences, its registration, its fragments and their stream."""
