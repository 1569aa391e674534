"""A host of files over plain TCP, which answers with any bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


class FileHost:
    """A host, and what it was asked."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.requests: list[bytes] = []  # their heads
        self.names: list[str | None] = []  # of the host, from TLS
        self.connected = asyncio.Event()
        self.left = asyncio.Event()  # a client closed its connection before the answer's end


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """Return an answer with a Content-Length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def hosting_files(
    script: bytes | Script, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[FileHost]:
    """Answer every request with these bytes, or as the script writes it, and close the connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            made.connected.set()
            made.requests.append(await reader.readuntil(b"\r\n\r\n"))
            if isinstance(script, bytes):
                writer.write(script)
            else:
                await script(writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            made.left.set()
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    made = FileHost(server.sockets[0].getsockname()[1])
    if tls is not None:
        tls.sni_callback = lambda _, name, __: made.names.append(name)
    try:
        yield made
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
