"""What runs in the next step: a pure, synchronous decision maker without torch or I/O."""
