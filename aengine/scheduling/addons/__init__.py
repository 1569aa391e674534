"""Kinds of memory and queues that only some models or configurations need: windows, snapshots, tiers, adapters.

- `windows`, `snapshots`: two kinds of `Holding`, for layers with a sliding window and for recurrent layers.
- `loading`: loads KV pages from host memory and disk before a sequence is admitted.
- `adapter_queue`: the waiting queue of an engine with LoRA adapters.
"""
