"""The scheduler: decides what runs in the next step, synchronously and without torch or I/O.

In reading order: `scheduler` (what the engine calls), `planning/` (the contents of a step), `memory` (pages of
sequences), `sequence` (a sequence and its phase), `batch` (rows and transitions between phases), `flight` (steps in
flight and their results), `queue` (which sequence is admitted next). `holding` is the protocol for memory in addition
to pages. `addons/` has the kinds of memory and queues that only some models or configurations need. `integrity` checks
all of it, for tests.
"""
