"""The scheduler: decides, synchronously and without torch or I/O, what runs in the next step."""
