"""Requests that go to every replica, and how their answers become one."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from aengine.http.operators.admin import Aborted
from aengine.http.operators.load import LoadList, ServerLoad, WorkerLoad
from aengine.ray_serve.call import Head

CHANGES = ("/sleep", "/wake_up", "/reload")  # they move weights and may take minutes
TO_ALL = {
    *(("GET", path) for path in ("/metrics", "/load", "/get_load", "/v1/loads", "/is_sleeping")),
    *(("POST", path) for path in CHANGES),
    *(("POST", path) for path in ("/abort", "/flush_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")),
}

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+.*)")


def merge(path: str, heads: Mapping[str, Head]) -> Head:
    """Return the sum of all replicas' answers, or the first one. If a replica refuses, return its answer."""
    for head in heads.values():
        if head.status != 200:
            return head
    first = next(iter(heads.values()))
    if path == "/abort":
        total = sum(msgspec.json.decode(head.body, type=Aborted).aborted for head in heads.values())
        return _with_body(first, msgspec.json.encode(Aborted(total)))
    if path == "/load":
        load = sum(msgspec.json.decode(head.body, type=ServerLoad).server_load for head in heads.values())
        return _with_body(first, msgspec.json.encode(ServerLoad(load)))
    if path == "/get_load":
        workers = [one for head in heads.values() for one in msgspec.json.decode(head.body, type=list[WorkerLoad])]
        ranked = [msgspec.structs.replace(one, dp_rank=rank) for rank, one in enumerate(workers)]
        return _with_body(first, msgspec.json.encode(ranked))
    if path == "/v1/loads":
        lists = [msgspec.json.decode(head.body, type=LoadList) for head in heads.values()]
        loads = [msgspec.structs.replace(one.loads[0], dp_rank=rank) for rank, one in enumerate(lists)]
        return _with_body(first, msgspec.json.encode(LoadList(lists[0].timestamp, loads, len(loads))))
    if path == "/metrics":
        return _with_body(first, merge_metrics({name: head.body.decode() for name, head in heads.items()}).encode())
    return first


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge the metrics of several replicas, in Prometheus' text format. Every sample gets the label `replica`.

    The lines of a family stand together, as the format requires.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> its comments, its samples
    for replica, text in texts.items():
        family: tuple[list[str], list[str]] = ([], [])
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, ([], []))
                if line not in family[0]:
                    family[0].append(line)
            elif (sample := _SAMPLE.fullmatch(line)) is not None:
                labels = ",".join(filter(None, [sample["labels"], f'replica="{replica}"']))
                family[1].append(f"{sample['name']}{{{labels}}} {sample['value']}")
    return "".join(f"{line}\n" for comments, samples in families.values() for line in [*comments, *samples])


def _with_body(head: Head, body: bytes) -> Head:
    headers = [(name, value) for name, value in head.headers if name != b"content-length"]
    return Head(head.status, [*headers, (b"content-length", str(len(body)).encode())], body)
