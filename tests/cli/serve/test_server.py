"""`aengine serve`: it prints its address, ends after signals, and fails with one sentence."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import ssl
from pathlib import Path

import anyio
import httpx2
import pytest
import trustme

from aengine.app import Application
from aengine.cli.serve.server import _announce, _handle_signals, listening_sockets
from aengine.config import EngineConfig, ListenConfig, ServerConfig
from tests.cli.running import run, served
from tests.http.serving import parse_events

STARTING = "aengine: starting; the model is aengine-demo\n"  # printed before imports, which take seconds
LONG = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


def test_its_printed_command_works_and_it_ends_with_0() -> None:
    with served() as server:
        command = shlex.split(next(line for line in server.told if "curl" in line))
        answer = server.client.post(command[2].removeprefix(server.url), content=command[4])
        assert command[2].startswith(server.url)
        assert parse_events(answer.text)[0]["text"].startswith(" Paris")
        assert "server" not in answer.headers
        server.send(signal.SIGTERM)
        status, rest = server.end()
    assert status == 0
    assert "Traceback" not in rest


@pytest.mark.slow
def test_a_model_over_two_ranks_gives_the_same_answer() -> None:
    said = []
    for ranks in ("2", "1"):
        with served("--tensor-parallel-size", ranks) as server:
            events = parse_events(server.client.post("/generate", json=LONG | {"max_tokens": 24}).text)
            said.append([token for event in events[:-1] for token in event["token_ids"]])
            server.send(signal.SIGTERM)
            status, rest = server.end()
        assert status == 0
        assert "Traceback" not in rest
        assert any("2 ranks" in line for line in server.told) == (ranks == "2")
    assert len(said[0]) == 24
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_running_answer_may_finish_while_new_work_is_refused(number: signal.Signals) -> None:
    with (
        served("--shutdown-timeout", "120") as server,
        server.client.stream("POST", "/generate", json=LONG | {"max_tokens": 400}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        server.send(number)
        server.wait_for("no new requests")
        server.send(signal.SIGHUP)  # a closing terminal may send it twice; the second one changes nothing
        refused = server.client.post("/generate", json=LONG)
        ready = server.client.get("/ready")
        health = server.client.get("/health")
        *_, done, _ = lines
        status, _ = server.end()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert refused.headers["retry-after"] == "1"
    assert ready.status_code == health.status_code == 503
    assert done == "data: [DONE]"
    assert status == 0


@pytest.mark.parametrize(
    "patience", [pytest.param("0.2", marks=pytest.mark.slow), pytest.param("60", marks=pytest.mark.slow)]
)
def test_an_answer_that_takes_too_long_ends_with_an_error(patience: str) -> None:
    """Answers end after the timeout, or at the second signal."""
    with (
        served("--shutdown-timeout", patience) as server,
        server.client.stream("POST", "/generate", json=LONG | {"max_tokens": 2000}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        server.send(signal.SIGTERM)
        server.wait_for("no new requests")
        if patience == "60":
            server.send(signal.SIGTERM)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        status, rest = server.end()
    assert events[-1]["error"]["code"] == "shutting_down"
    assert status == 0
    assert "Traceback" not in rest


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with authority.pem, chain.pem and key.pem of 127.0.0.1, and the last two in both.pem."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    issued = authority.issue_cert("127.0.0.1")
    (folder / "chain.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "both.pem"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "http2"), [(["chain.pem", "key.pem"], True), (["both.pem"], False)], ids=["offers HTTP/2", "does not"]
)
def test_it_speaks_https(certificates: Path, files: list[str], http2: bool) -> None:
    flags = [
        str(part)
        for pair in zip(("--ssl-certfile", "--ssl-keyfile"), files)
        for part in (pair[0], certificates / pair[1])
    ]
    trust = ssl.create_default_context(cafile=str(certificates / "authority.pem"))
    with served(*flags) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with httpx2.Client(base_url=server.url, verify=trust, http2=http2, timeout=30, trust_env=False) as client:
            answer = client.post("/generate", json={"prompt": "The capital of France is", "temperature": 0})
            assert answer.http_version == "HTTP/1.1"
            assert parse_events(answer.text)[0]["text"].startswith(" Paris")
            # The page calls its own server with the same scheme.
            ours = client.post("/generate", json={"prompt": "x", "max_tokens": 1}, headers={"origin": server.url})
            assert ours.status_code == 200
        server.send(signal.SIGTERM)
        status, rest = server.end()
    assert status == 0
    assert "Traceback" not in rest


@pytest.mark.slow
def test_tls_that_does_not_begin_ends_as_soon_as_a_silent_connection(certificates: Path) -> None:
    with (
        served("--ssl-certfile", str(certificates / "both.pem"), "--keep-alive-timeout", "0.5") as server,
        socket.create_connection(("127.0.0.1", server.client.base_url.port or 0), timeout=8) as raw,
    ):
        assert raw.recv(1) == b""


@pytest.mark.slow
def test_a_certificate_that_is_none(certificates: Path, tmp_path: Path) -> None:
    key, chain, empty = certificates / "key.pem", certificates / "chain.pem", tmp_path / "empty.pem"
    empty.write_text("")
    for flags, told in (
        (["--ssl-certfile", tmp_path / "no.pem"], f"ssl_certfile: {tmp_path}/no.pem: No such file or directory"),
        (["--ssl-certfile", chain, "--ssl-keyfile", tmp_path], f"ssl_keyfile: {tmp_path}: Is a directory"),
        (["--ssl-certfile", chain], "ssl_certfile: not a certificate with its key"),
        (["--ssl-certfile", empty, "--ssl-keyfile", key], "ssl_certfile, ssl_keyfile: not a certificate with its key"),
        (["--ssl-keyfile", key], "ssl_keyfile: a key needs its certificate (--ssl-certfile)"),
    ):
        done = run("serve", *map(str, flags), "--port", "0")
        assert done.returncode == 1
        assert done.stderr.startswith(f"{STARTING}aengine: {told}"), done.stderr
        assert done.stderr.count("\n") == 2


@pytest.mark.anyio
async def test_a_signal_during_loading_is_reported_and_no_address_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app, stop = Application(EngineConfig(), ServerConfig(), None), asyncio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_announce, app, ServerConfig(), stop, "http://127.0.0.1:1")
        tasks.start_soon(_handle_signals, app, stop, 30.0)
        await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        app.settled.set()  # the thread has loaded the model in the end
        await asyncio.sleep(0.01)
        tasks.cancel_scope.cancel()
    told = "aengine: SIGINT: stopping when the model is loaded (again: leave at once)\n"
    assert capsys.readouterr() == ("", told)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
        done = run("serve", "--port", port)
    assert done.returncode == 1
    told = f"aengine: cannot listen on 127.0.0.1:{port}: the port is taken; choose another with --port\n"
    assert done.stderr == STARTING + told
    assert done.stdout == ""


@pytest.mark.slow
def test_a_model_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = run("serve", str(tmp_path), "--port", "0")
    assert done.returncode == 1
    _, line = done.stderr.splitlines()
    assert line.startswith("aengine: the engine could not be started: ")
    assert "config.json" in line


@pytest.mark.parametrize(
    ("args", "env", "told"),
    [
        (["--workers", "2"], {}, "--workers 2: the engine is one process"),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs"),
        ([], {"AENGINE_PORT": "many"}, "AENGINE_PORT"),
        (["--dtype", "int3"], {}, "int3"),
        (["--max-num-seq", "3"], {}, "--max-num-seq"),
    ],
)
def test_wrong_arguments_are_refused_before_loading(args: list[str], env: dict[str, str], told: str) -> None:
    done = run("serve", *args, **env)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_knobs_arrive() -> None:
    with served(
        "--served-model-name", "mine", "second", "--max-body-bytes", "100", "--max-num-seqs", "3", "--access-log"
    ) as server:
        assert server.client.get("/v1/models").json()["data"][0]["id"] == "mine"
        assert server.client.post("/generate", json={"prompt": "x" * 200}).status_code == 413
        head = {"X-Long": "x" * 100_000}
        assert server.client.get("/ready", headers=head).status_code == 431
        server.send(signal.SIGTERM)
        _, rest = server.end()
    told = "".join(server.told) + rest
    assert "up to 3 rows" in told
    assert "(mine, also called second, is ready after" in told
    assert '"GET /v1/models HTTP/1.1" 200' in told


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_localhost_is_listened_to_over_ipv6_too(host: str) -> None:
    """Both sockets have the same port. If it is taken on IPv6, only IPv4 is used."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
            port = taken.getsockname()[1]
            alone = listening_sockets(ListenConfig(host=host, port=port))
    except OSError:
        pytest.skip("there is no IPv6")
    both = listening_sockets(ListenConfig(host=host, port=0))
    names = [[sock.getsockname()[:2] for sock in sockets] for sockets in (alone, both)]
    for sock in (*alone, *both):
        sock.close()
    assert names[0] == [("127.0.0.1", port)]
    assert names[1] == [("127.0.0.1", names[1][0][1]), ("::1", names[1][0][1])]
