"""Runs the HTTP server in this process: configures hypercorn, and lets running answers finish after a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import anyio
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

from aengine.app import Application
from aengine.cli.errors import CommandError
from aengine.config import EngineConfig, ListenConfig, ServerConfig
from aengine.process.standard_streams import lossy_streams

_FINAL_MESSAGE_SECONDS = 3.0  # for sending the last event of streams that are ended
_LOADING_SECONDS = 600.0  # that a loading model may take to stop
_ACCEPT_BATCH = 4  # connections accepted per pass of the event loop, about 10 ms: a burst must not delay streams
_SEND_BUFFER = 256 * 2**10  # bytes; the kernel's default is megabytes for a client that does not read
_CLOSE_SECONDS = 10.0  # in which connections and the device must be closed
_HANDSHAKE_SECONDS = 10.0  # that a TLS handshake may take

_PROMPT = '{"prompt":"The capital of France is","max_tokens":20}'


def serve(engine: EngineConfig, server: ServerConfig, listen: ListenConfig) -> int:
    """Serve until a signal. Return the exit status: 0, or 1 if the model could not be loaded or the engine failed."""
    check_certificate(listen)
    allow_many_connections()
    with lossy_streams():
        app = Application(engine, server, None)
        app.announces = False
        return asyncio.run(_serve(app, server, listen, listening_sockets(listen)))


def check_certificate(listen: ListenConfig) -> None:
    """Raise `CommandError` unless the certificate and its key can be used for HTTPS."""
    if listen.ssl_certfile is None:
        if listen.ssl_keyfile is not None:
            raise CommandError("ssl_keyfile: a key needs its certificate (--ssl-certfile)")
        return
    for name, path in (("ssl_certfile", listen.ssl_certfile), ("ssl_keyfile", listen.ssl_keyfile)):
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise CommandError(f"{name}: {path}: {os.strerror(error.errno or 0)}") from None
    try:
        # The empty password: hypercorn would otherwise ask the terminal for it during the start.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(listen.ssl_certfile, listen.ssl_keyfile, password="")
    except ssl.SSLError as error:
        reason = f" ({error.reason})" if error.reason else ""
        given = "ssl_certfile" if listen.ssl_keyfile is None else "ssl_certfile, ssl_keyfile"
        raise CommandError(f"{given}: not a certificate with its key, unencrypted and in PEM{reason}") from None


def allow_many_connections() -> None:
    """Raise the limit of open files to its hard limit. Many systems start with 1024."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # "unlimited" may be above the kernel's own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listening_sockets(listen: ListenConfig) -> list[socket.socket]:
    """Return the listening sockets. They are bound before the model is loaded. Raises `CommandError`.

    For the host `localhost` there is a second socket at ::1, because some clients resolve the name to it.
    """
    first = listening_socket(listen)
    sockets = [first]
    if listen.host in ("127.0.0.1", "localhost"):
        with suppress(OSError):  # without IPv6, or if the port is taken there: only 127.0.0.1
            sockets.append(_bind(socket.AF_INET6, ("::1", first.getsockname()[1]), listen.backlog))
    return sockets


def _bind(family: int, address: Any, backlog: int) -> socket.socket:
    sock = socket.create_server(address, family=family, backlog=backlog)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # its connections inherit it
    return sock


def listening_socket(listen: ListenConfig) -> socket.socket:
    """Return a listening socket at the host. Raises `CommandError`."""
    where = f"{listen.host}:{listen.port}"
    host = "127.0.0.1" if listen.host == "localhost" else listen.host or None
    try:
        family, *_, address = socket.getaddrinfo(host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return _bind(family, address[:2], listen.backlog)
    except socket.gaierror:
        raise CommandError(f"cannot listen on {where}: there is no such address (--host)") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"cannot listen on {where}: the port is taken; choose another with --port") from None
        raise CommandError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}") from None


def hypercorn_config(listen: ListenConfig, sockets: Sequence[socket.socket]) -> Config:
    """Return hypercorn's settings. It takes over the sockets.

    There is no read_timeout, because it would end streams. The application bounds bodies.
    """
    config = Config()
    config.bind = [f"fd://{sock.detach()}" for sock in sockets]
    config.backlog = _ACCEPT_BATCH  # asyncio uses it for the kernel's queue and for the connections of one pass
    if listen.ssl_certfile is not None:
        config.certfile = listen.ssl_certfile
        config.keyfile = listen.ssl_keyfile or listen.ssl_certfile
        config.ssl_handshake_timeout = min(_HANDSHAKE_SECONDS, listen.keep_alive_timeout)
    config.graceful_timeout = _FINAL_MESSAGE_SECONDS
    config.shutdown_timeout = _LOADING_SECONDS
    config.keep_alive_timeout = listen.keep_alive_timeout
    config.keep_alive_max_requests = listen.keep_alive_requests
    config.h11_max_incomplete_size = listen.max_header_bytes
    config.include_server_header = False
    config.errorlog = _logger("aengine.http.server", sys.stderr, logging.WARNING)
    if listen.access_log:
        config.accesslog = _logger("aengine.http.access", sys.stdout, logging.INFO)
    return config


def _logger(name: str, stream: TextIO, level: int) -> logging.Logger:
    log = logging.getLogger(name)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("aengine: %(message)s" if stream is sys.stderr else "%(message)s"))
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
    return log


async def _serve(app: Application, server: ServerConfig, listen: ListenConfig, sockets: Sequence[socket.socket]) -> int:
    stop = asyncio.Event()
    host, port = sockets[0].getsockname()[:2]
    twins = [sock.dup() for sock in sockets]

    async def listening() -> None:
        for twin in twins:  # hypercorn calls this after it has begun to listen with its own small backlog
            with twin:
                twin.listen(listen.backlog)
        await stop.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_handle_signals, app, stop, listen.shutdown_timeout)
        tasks.start_soon(_announce, app, server, stop, _url(host, port, listen.ssl_certfile is not None))
        # In its own task: in Python 3.11 asyncio's TaskGroup leaves that task marked as cancelled.
        await asyncio.create_task(hypercorn_serve(app, hypercorn_config(listen, sockets), shutdown_trigger=listening))  # type: ignore[arg-type]
        tasks.cancel_scope.cancel()
    return 0 if app.failure is None else 1


def _url(host: str, port: int, https: bool) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'s' if https else ''}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def greeting(url: str, ready: str, server: ServerConfig) -> str:
    """Return the addresses of a ready server, and a command to try. ready: a sentence with the model's names."""
    key = ' -H "Authorization: Bearer $AENGINE_API_KEY"' if server.api_keys else ""
    addresses = [("OpenAI's clients", f"{url}/v1"), ("Anthropic's clients", url)]
    if server.page:
        addresses.append(("a page to chat on", f"{url}/"))
    lines = [f"  {what:<20}{address}" for what, address in addresses]
    command = f"  curl -N {url}/generate -d '{_PROMPT}'{key}"
    return "\n".join(["", f"Serving on {url} ({ready}; Ctrl-C stops)", "", *lines, command, ""])


async def _announce(app: Application, server: ServerConfig, stop: asyncio.Event, url: str) -> None:
    """Print the server's address when it is ready. Stop the server if the engine cannot be started or fails."""
    await app.settled.wait()
    if stop.is_set():
        return
    if not app.failed.is_set():
        print(greeting(url, app.ready_text, server), flush=True)
        await app.failed.wait()
        _print(f"exiting with status 1; clients get {_FINAL_MESSAGE_SECONDS:g} s to receive the error")
        _exit_after_timeout(1)  # freeing tensors of a dead device, or joining its threads, may hang
        with anyio.move_on_after(_FINAL_MESSAGE_SECONDS):
            await app.drain()
        app.cut_off()
    stop.set()


async def _handle_signals(app: Application, stop: asyncio.Event, seconds: float) -> None:
    """Handle signals: the first drains, the second ends running answers, the third ends the process.

    While the model loads, the second signal ends the process. A closing terminal may send SIGHUP twice, so that a
    second SIGHUP is ignored.
    """
    drain_scope = anyio.CancelScope()

    async def drain() -> None:
        with drain_scope, anyio.move_on_after(seconds):
            await app.drain()
        app.cut_off()
        stop.set()
        if app.settled.is_set():
            _exit_after_timeout(0)  # asyncio's wait_for can lose a connection's cancellation in Python 3.11

    with anyio.open_signal_receiver(*_signals()) as signals:
        async with anyio.create_task_group() as tasks:
            received = 0
            async for number in signals:
                if received and number.name == "SIGHUP":
                    continue
                received += 1
                if received == 1:
                    if app.settled.is_set():
                        _print(
                            f"{number.name}: no new requests; running answers have {seconds:g} s (again: end them now)"
                        )
                    else:  # the thread that loads weights cannot be stopped
                        _print(f"{number.name}: stopping when the model is loaded (again: leave at once)")
                    tasks.start_soon(drain)
                elif received == 2 and app.settled.is_set():
                    _print(f"{number.name}: ending running answers")
                    drain_scope.cancel()
                else:
                    _print(f"{number.name}: leaving at once")
                    os._exit(130)


def _signals() -> list[signal.Signals]:
    """Return the signals that end the server. SIGHUP does not if it is ignored, as under `nohup`."""
    both = [signal.SIGINT, signal.SIGTERM]
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return both
    return [*both, signal.SIGHUP]


def _exit_after_timeout(status: int) -> None:
    """Exit by force if the process is still running after every client had time for its last message."""
    timer = threading.Timer(_FINAL_MESSAGE_SECONDS + _CLOSE_SECONDS, os._exit, [status])
    timer.daemon = True
    timer.start()


def _print(text: str) -> None:
    print(f"aengine: {text}", file=sys.stderr, flush=True)
