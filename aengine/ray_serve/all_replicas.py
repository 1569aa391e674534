"""Requests that go to every replica, and one answer made of theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from aengine.http.operators.admin import Aborted
from aengine.http.operators.load import LoadList, ServerLoad, WorkerLoad
from aengine.ray_serve.call import Head

CHANGES = ("/sleep", "/wake_up", "/reload")  # of what lies on devices: they take as long as they take
TO_ALL = {
    *(("GET", path) for path in ("/metrics", "/load", "/get_load", "/v1/loads", "/is_sleeping")),
    *(("POST", path) for path in CHANGES),
    *(("POST", path) for path in ("/abort", "/flush_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")),
}

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+.*)")


def merged(path: str, heads: Mapping[str, Head]) -> Head:
    """One answer of those that replicas gave, by name: the sum, or the first where that says all; a refusal wins."""
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
        return _with_body(first, merged_metrics({name: head.body.decode() for name, head in heads.items()}).encode())
    return first


def merged_metrics(texts: Mapping[str, str]) -> str:
    """Metrics of several replicas in Prometheus' text format as one: every sample gets the label `replica`.

    A family's lines stand together, as the format demands.
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
