"""Finds decoding sequences with the same cached prefix, so that a step reads its pages once for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq

from aengine.cache.radix import Node
from aengine.scheduling.sequence import AdmittedPages, Sequence
from aengine.step_plan import MOST_SHARED_RUNS, SharedRun

LEAST_SAVED = 16384  # tokens that a shared run must save to be worth a separate pass (bench/KERNELS.md)


def shared_runs(sequences: Seq[Sequence], page_size: int) -> list[SharedRun]:
    """Return disjoint groups of sequences that share a prefix, the group that saves most first.

    Members are indices into `sequences`. A group of m that shares t tokens saves reading (m - 1) * t tokens. If a group
    contains smaller groups with longer prefixes, either it or these are chosen, whichever save more. Only nodes that
    several sequences share are visited.
    """
    indices: dict[AdmittedPages, list[int]] = defaultdict(list)
    for i, sequence in enumerate(sequences):
        if sequence.admitted is not None:
            indices[sequence.admitted].append(i)
    members: dict[Node, list[int]] = defaultdict(list)
    for admitted, together in indices.items():
        node: Node | None = admitted.node
        while node is not None and node.parent is not None:
            if node.locks > 1 or len(together) > 1:  # a sequence that holds a node also holds its ancestors
                members[node] += together
            node = node.parent
    below: dict[Node, int] = defaultdict(int)  # tokens saved by the best groups among a node's descendants
    chosen: list[Node] = []
    undivided: set[Node] = set()  # nodes that save at least as much as their descendants
    for node in sorted(members, key=lambda node: -node.depth):
        saved = (len(members[node]) - 1) * node.depth * page_size
        if saved >= below[node]:
            undivided.add(node)
        if node.parent is not None:
            below[node.parent] += max(saved, below[node])
    taken: set[int] = set()
    for node in sorted(undivided, key=lambda node: node.depth):
        group = members[node]
        if (len(group) - 1) * node.depth * page_size >= LEAST_SAVED and taken.isdisjoint(group):
            taken.update(group)
            chosen.append(node)
    chosen.sort(key=lambda node: -(len(members[node]) - 1) * node.depth)
    return [SharedRun(members=members[node], tokens=node.depth * page_size) for node in chosen[:MOST_SHARED_RUNS]]
