"""The scheduler: decides what runs in the next step, synchronously and without torch or I/O.

In reading order:

- `scheduler`: what the engine calls
- `planning/`: the contents of a step
- `memory`: pages of sequences
- `sequence`: a sequence and its phase
- `batch`: rows, and transitions between phases
- `flight`: steps in flight, and their results
- `queue`: which sequence is admitted next
- `acceptance`: how often drafts are accepted
- `holding`: the interface of memory that sequences hold in addition to pages
- `addons/`: kinds of memory and queues that only some models or configurations need
- `integrity`: checks of all of these
"""
