"""The main lines over HTTP/2 without TLS, by prior knowledge: hypercorn speaks it, so it is part of the server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes

from tests.reliability.raw_server import KEY, RawServer, raw_server, within

SECONDS = 30.0
MARGIN = 15.0  # seconds; the machine may be busy
LIMIT = 200_000  # bytes of a body


@pytest.fixture(scope="module")
def server() -> Iterator[RawServer]:
    with raw_server("--max-body-bytes", str(LIMIT), "--body-timeout", "1.5", "--keep-alive-timeout", "3") as server:
        yield server
        # After all of it nothing is left behind.
        assert within(MARGIN, lambda: server.connections() == 0)
        assert within(MARGIN, server.at_rest)


class Client:
    """One connection; what its streams have got so far, by stream id."""

    def __init__(self, server: RawServer, receive_buffer: int | None = None, window: int | None = None) -> None:
        self.raw = server.connect(receive_buffer)
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        if window is not None:
            self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
            self.h2.increment_flow_control_window(window)
        self.flush()
        self.status: dict[int, int] = {}
        self.body: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.reset: set[int] = set()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    def flush(self) -> None:
        self.raw.sendall(self.h2.data_to_send())

    def ask(self, method: str, path: str, *more: tuple[str, str], key: bool = True, end: bool = True) -> int:
        stream = self.h2.get_next_available_stream_id()
        headers = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "localhost"), *more]
        self.h2.send_headers(stream, headers + [("authorization", f"Bearer {KEY}")] * key, end_stream=end)
        self.flush()
        return stream

    def post(self, path: str, **body: object) -> int:
        stream = self.ask("POST", path, end=False)
        self.h2.send_data(stream, json.dumps(body).encode(), end_stream=True)
        self.flush()
        return stream

    def read_until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < end, (self.status, self.ended, self.reset)
            data = self.raw.recv(1 << 16)
            assert data, "the connection was closed"
            for event in self.h2.receive_data(data):
                self.take(event)
            self.flush()

    def take(self, event: Event, acknowledge: bool = True) -> None:
        match event:
            case ResponseReceived(stream_id=int(stream)):
                self.status[stream] = int(dict(event.headers or ())[":status"])
            case DataReceived(stream_id=int(stream)):
                self.body[stream] = self.body.get(stream, b"") + event.data
                if acknowledge:
                    self.h2.acknowledge_received_data(event.flow_controlled_length or 0, stream)
            case StreamEnded(stream_id=int(stream)):
                self.ended.add(stream)
            case StreamReset(stream_id=int(stream)):
                self.reset.add(stream)


def test_a_completion_and_a_stream(server: RawServer) -> None:
    asked = {"prompt": "The capital of France is", "max_tokens": 20, "temperature": 0}
    with Client(server) as client:
        whole = client.post("/v1/completions", **asked)
        stream = client.post("/generate", **asked)
        client.read_until(lambda: {whole, stream} <= client.ended)
    assert client.status == {whole: 200, stream: 200}
    text = json.loads(client.body[whole])["choices"][0]["text"]
    events = [json.loads(line[6:]) for line in client.body[stream].splitlines() if line.startswith(b"data: {")]
    assert text == "".join(event["text"] for event in events)
    assert "Paris" in text
    assert client.body[stream].endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
def test_more_streams_than_a_connection_may_have_at_once(server: RawServer) -> None:
    """Those beyond what the server allows wait for their turn at the client; all 120 get their own answer."""
    with Client(server) as client:
        client.read_until(lambda: client.h2.remote_settings.get(SettingCodes.MAX_CONCURRENT_STREAMS, 0) == 100)
        streams: dict[int, int] = {}
        for number in range(120):
            client.read_until(lambda: len(streams) - len(client.ended) < 100)
            length = 1 + number % 3
            stream = client.post("/generate", prompt=f"Number {number}", max_tokens=length, ignore_eos=True)
            streams[stream] = length
        client.read_until(lambda: streams.keys() <= client.ended)
    assert set(client.status.values()) == {200}
    for stream, length in streams.items():
        usage = b'"completion_tokens":%d' % length
        assert usage in client.body[stream]


@pytest.mark.slow
def test_a_reset_aborts_its_own_stream_alone(server: RawServer) -> None:
    before = server.figure("generated_tokens_total")
    with Client(server) as client:
        long = client.post("/generate", prompt="Once upon a time", max_tokens=2000, ignore_eos=True)
        other = client.post("/generate", prompt="One two three", max_tokens=200, ignore_eos=True)
        client.read_until(lambda: long in client.body and other in client.body)
        client.h2.reset_stream(long, ErrorCodes.CANCEL)
        client.flush()
        client.read_until(lambda: other in client.ended)
        assert b'"completion_tokens":200' in client.body[other]
        assert within(MARGIN, server.at_rest)
    assert server.figure("generated_tokens_total") - before < 2000


@pytest.mark.slow
def test_a_hundred_resets_at_once(server: RawServer) -> None:
    """Streams opened and reset at once, again and again: each gives its row back, and the server goes on."""
    with Client(server) as client:
        for _ in range(5):
            for number in range(20):
                stream = client.post("/generate", prompt=f"Story {number}", max_tokens=2000, ignore_eos=True)
                client.h2.reset_stream(stream, ErrorCodes.CANCEL)
            client.flush()
        last = client.post("/generate", prompt="One two three", max_tokens=4, ignore_eos=True)
        client.read_until(lambda: last in client.ended)
        assert within(MARGIN, server.at_rest)


def send_body(client: Client, stream: int, size: int) -> None:
    """As much as the server's windows allow, until it is all sent or the answer has ended."""
    left = size
    while left and stream not in client.ended | client.reset:
        room = min(left, client.h2.local_flow_control_window(stream), client.h2.max_outbound_frame_size)
        if room:
            client.h2.send_data(stream, bytes(room))
            client.flush()
            left -= room
        else:
            window = client.h2.local_flow_control_window(stream)
            client.read_until(
                lambda window=window: client.h2.local_flow_control_window(stream) > window or stream in client.ended
            )
    if stream not in client.ended | client.reset:
        client.h2.end_stream(stream)
        client.flush()


@pytest.mark.slow
def test_a_body_over_the_limit_is_refused_and_its_connection_goes_on(server: RawServer) -> None:
    before = server.memory()
    with Client(server) as client:
        other = client.post("/generate", prompt="Once upon a time", max_tokens=400, ignore_eos=True)
        declared = client.ask("POST", "/generate", ("content-length", "1000000"), end=False)
        client.read_until(lambda: declared in client.status)
        send_body(client, declared, 1_000_000)
        undeclared = client.ask("POST", "/generate", end=False)
        send_body(client, undeclared, 1_000_000)
        stranger = client.ask("POST", "/generate", key=False, end=False)
        send_body(client, stranger, 1_000_000)
        client.read_until(lambda: {declared, undeclared, stranger, other} <= client.ended)
    assert {**client.status, other: 200} == {other: 200, declared: 413, undeclared: 413, stranger: 401}
    assert b'"completion_tokens":400' in client.body[other]
    assert server.memory() - before < 40_000_000


@pytest.mark.slow
def test_a_body_that_does_not_come_is_a_408_and_its_connection_goes_on(server: RawServer) -> None:
    with Client(server) as client:
        slow = client.ask("POST", "/generate", end=False)
        client.h2.send_data(slow, b"{")
        client.flush()
        other = client.post("/generate", prompt="One two three", max_tokens=4, ignore_eos=True)
        client.read_until(lambda: {slow, other} <= client.ended)
    assert (client.status[slow], client.status[other]) == (408, 200)


@pytest.mark.slow
def test_a_stream_that_nobody_reads_is_reset_and_its_connection_goes_on() -> None:
    """Its window is used up, and the client reads on only what comes of other streams."""
    with raw_server("--stalled-reader-timeout", "1") as server, Client(server) as client:
        asked = {"prompt": "Once", "ignore_eos": True, "logprobs": 20}
        stalled = client.post("/generate", **asked, max_tokens=1500)
        assert within(SECONDS, lambda: server.figure("stalled_readers_total") == 1)
        assert within(MARGIN, server.at_rest)
        assert server.figure("generated_tokens_total") < 1500
        client.read_until(lambda: stalled in client.reset)
        assert 0 < len(client.body[stalled]) <= 2**16 - 1  # the window
        other = client.post("/generate", **asked, max_tokens=300)
        client.read_until(lambda: other in client.ended)
    assert client.body[other].endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
def test_a_connection_that_is_full_goes_on_without_the_stream_that_nobody_reads() -> None:
    """Its other streams are read all the time, but more slowly than they could be sent."""
    with raw_server("--stalled-reader-timeout", "4") as server, Client(server, 2**16) as client:
        client.h2.increment_flow_control_window(2**24)
        asked = {"prompt": "Once", "ignore_eos": True, "logprobs": 20}
        stalled = client.post("/generate", **asked, max_tokens=1500)
        read = [client.post("/generate", **asked, max_tokens=500) for _ in range(3)]
        for stream in read:
            client.h2.increment_flow_control_window(2**20, stream)
        client.flush()
        began, heard = time.monotonic(), 0
        while not client.ended.issuperset(read):
            data = client.raw.recv(1 << 14)
            assert data, "the connection was closed"
            heard += len(data)
            for event in client.h2.receive_data(data):
                client.take(event, acknowledge=getattr(event, "stream_id", None) != stalled)
            client.flush()
            time.sleep(max(0.0, heard / 300_000 - (time.monotonic() - began)))  # as slow as that
    assert client.reset == {stalled}
    assert all(client.body[stream].endswith(b"data: [DONE]\n\n") for stream in read)


@pytest.mark.slow
def test_a_connection_that_takes_nothing_at_all_is_ended() -> None:
    """Its windows are wide, so that all the buffers between the two fill up."""
    with raw_server("--stalled-reader-timeout", "1") as server, Client(server, 4096, 2**30) as client:
        for _ in range(8):
            client.post("/generate", prompt="Once", ignore_eos=True, logprobs=20, max_tokens=1500)
        assert within(SECONDS, lambda: server.figure("stalled_readers_total") >= 1)
        assert within(MARGIN, lambda: server.connections() == 0)
        assert within(MARGIN, server.at_rest)
        assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "//health", "/health/../metrics", "/health/%2e%2e/metrics", "http://a/health", "*"]
)
def test_the_key_is_asked_for_here_too(server: RawServer, path: str) -> None:
    with Client(server) as client:
        refused = [client.ask(method, path, key=False) for method in ("GET", "POST", "HEAD")]
        let_in = client.ask("GET", "/health", key=False)
        client.read_until(lambda: {*refused, let_in} <= client.ended)
    assert [client.status[one] for one in refused] == [401, 401, 401]
    assert client.status[let_in] == 200


@pytest.mark.parametrize(
    "frames",
    [bytes(9), b"\x00\x40\x00\x01\x04\x00\x00\x00\x01" + b"\xff" * 0x4000],
    ids=["data that belongs to no stream", "headers that nothing decodes"],
)
def test_frames_that_are_none_end_their_own_connection(server: RawServer, frames: bytes) -> None:
    with Client(server) as client, Client(server) as other:
        running = other.post("/generate", prompt="Once upon a time", max_tokens=50, ignore_eos=True)
        client.raw.sendall(frames * 3)
        try:
            while client.raw.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        other.read_until(lambda: running in other.ended)
    assert b"[DONE]" in other.body[running]


def test_an_upgrade_from_http_1_asks_for_the_key(server: RawServer) -> None:
    upgrade = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    with server.connect() as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n")
        heard = b""
        while b"\r\n\r\n" not in heard:
            heard += raw.recv(1 << 16)
        client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        client.initiate_upgrade_connection()
        raw.sendall(client.data_to_send())
        raw.settimeout(SECONDS)
        statuses: list[str] = []
        pending = heard.partition(b"\r\n\r\n")[2]
        while not statuses:
            answers = [event for event in client.receive_data(pending) if isinstance(event, ResponseReceived)]
            statuses += [dict(answer.headers or ())[":status"] for answer in answers]
            pending = b"" if statuses else raw.recv(1 << 16)
        raw.shutdown(socket.SHUT_RDWR)
    assert heard.startswith(b"HTTP/1.1 101")
    assert statuses == ["401"]
