"""Streaming over HTTP on loopback: many SSE clients in one process against a server in another.

    python bench/http_stream.py --url http://127.0.0.1:8000 --clients 256 --input 512 --output 512

The clients are raw sockets, so that they cost less than the server. Tokens are counted from the token ids in the
events. Gaps between events are reported with the tokens per event, because a stream that is behind gets several tokens
in one event. With --long, one more client sends a prompt of that many tokens once all streams run. The other streams'
gaps during its prefill are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

from bench.results import Report


@dataclass
class Client:
    """Arrival times of one stream's events, in seconds since its request."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: str | None = None


async def stream(host: str, port: int, body: bytes, client: Client) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    client.sent = time.perf_counter()
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    status = await reader.readline()
    if b" 200 " not in status:
        client.failed = status.decode()
    while client.failed is None:
        line = await reader.readline()
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                client.failed = str(event["error"])
            elif event["token_ids"]:
                client.times.append(time.perf_counter())
                client.tokens += len(event["token_ids"])
        elif line.startswith(b"data: [DONE]") or not line:
            break
    writer.close()


def body_of(rng: random.Random, prompt: int, tokens: int) -> bytes:
    ids = [rng.randrange(4000) for _ in range(prompt)]
    return json.dumps({"input_ids": ids, "max_tokens": tokens, "temperature": 0.6, "ignore_eos": True}).encode()


async def long_prompt(host: str, port: int, body: bytes, clients: list[Client]) -> dict[str, float | None]:
    """Send it once every client streams; the gaps of the others until its first token."""
    while not all(len(client.times) > 8 or client.failed for client in clients):
        await asyncio.sleep(0.01)
    reader = Client()
    await stream(host, port, body, reader)
    begin, end = reader.sent, reader.times[0]
    gaps = sorted(
        b - a
        for client in clients
        for a, b in zip(client.times, client.times[1:], strict=False)
        if a < end and b > begin
    )
    return {
        "long_ttft_ms": round((end - begin) * 1e3, 1),
        "long_gap_median_ms": round(statistics.median(gaps) * 1e3, 1),
        "long_gap_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 1),
        "long_gap_worst_ms": round(gaps[-1] * 1e3, 1),
    }


async def run(options: argparse.Namespace, seed: int, report: Report) -> None:
    target = urlsplit(options.url)
    host, port = target.hostname or "127.0.0.1", target.port or 80
    rng = random.Random(seed)
    clients = [Client() for _ in range(options.clients)]
    bodies = [body_of(rng, options.input, options.output) for _ in clients]
    began = time.perf_counter()
    beside = None
    async with asyncio.TaskGroup() as group:
        for client, body in zip(clients, bodies, strict=True):
            group.create_task(stream(host, port, body, client))
        if options.long:
            beside = group.create_task(long_prompt(host, port, body_of(rng, options.long, 1), clients))
    wall = time.perf_counter() - began
    failed = [client.failed for client in clients if client.failed]
    gaps = sorted(b - a for client in clients for a, b in zip(client.times, client.times[1:], strict=False))
    first = [client.times[0] - client.sent for client in clients if client.times]
    tokens = sum(client.tokens for client in clients)
    events = sum(len(client.times) for client in clients)
    tpot = [(client.times[-1] - client.times[0]) / (client.tokens - 1) for client in clients if len(client.times) > 1]
    figures = {
        "tok_s": round(tokens / wall, 1),
        "tokens_per_event": round(tokens / max(events, 1), 2),
        "ttft_ms": round(statistics.median(first) * 1e3, 2) if first else None,
        "tpot_ms": round(statistics.median(tpot) * 1e3, 3) if tpot else None,
        "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 1) if gaps else None,
        "gap_worst_ms": round(gaps[-1] * 1e3, 1) if gaps else None,
        "failed": len(failed),
        **(beside.result() if beside is not None else {}),
    }
    case = {"clients": options.clients, "input": options.input, "output": options.output, "run": seed}
    report.tell(case, figures, detail={"failures": failed[:3]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--long", type=int, default=0, help="tokens of a prompt that comes while the others stream")
    parser.add_argument("--runs", type=int, default=2, help="the first one warms up")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("http_stream", options.out)
    for number in range(options.runs):
        asyncio.run(run(options, number, report))
    report.print_table()


if __name__ == "__main__":
    main()
