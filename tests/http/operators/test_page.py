"""`GET /`: one self-contained page, with headers that allow nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import httpx2
import pytest

from aengine.http.operators import page as parts
from aengine.ray_serve.all_replicas import merge_metrics
from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

PARTS = Path(parts.__file__).parent / "page"
MAX_BYTES = 192 * 1024


async def page(path: str = "/", method: str = "GET", headers: dict[str, str] | None = None) -> httpx2.Response:
    async with serving(served_model_name="the-secret-name") as server:
        return await server.client.request(method, path, headers=headers)


async def test_it_is_a_small_html_document() -> None:
    response = await page()
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text.startswith("<!doctype html>")
    assert len(response.content) < MAX_BYTES
    assert "{{" not in re.sub(r"<script.*?</script>|<style.*?</style>", "", response.text, flags=re.S)


async def test_it_holds_every_part_and_none_is_long() -> None:
    text = (await page()).text
    parts = [file for file in PARTS.rglob("*") if file.suffix in (".js", ".css")]
    assert len(parts) > 20
    assert [file.name for file in parts if file.read_text() not in text or file.read_text().count("\n") >= 400] == []


async def test_head_has_the_headers_and_no_body() -> None:
    response = await page(method="HEAD")
    assert response.status_code == 200
    assert response.content == b""
    assert int(response.headers["content-length"]) == len((await page()).content)


async def test_the_policy_admits_its_own_script_and_style_and_nothing_else() -> None:
    response = await page()
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", response.text, re.S)
        assert policy[rule] == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]


async def test_it_is_neither_framed_nor_sniffed_nor_referred_to() -> None:
    headers = (await page()).headers
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"


async def test_it_names_no_other_place() -> None:
    text = (await page()).text
    assert re.findall(r"https?://[^\s'\"`\\)]+", text) == [
        "http://www.w3.org/2000/svg",  # a namespace in the icon
        "http://${shown}",  # adds the scheme to a link in a model's text
    ]
    assert re.findall(r"\b(?:src|srcset|action)\s*=", text) == []
    assert re.findall(r"\son\w+\s*=", re.sub(r"<script.*</script>", "", text, flags=re.S)) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text) == []


async def test_it_knows_nothing_of_this_server() -> None:
    async with serving(FakeEngine(), served_model_name="the-secret-name") as server:
        here = await server.client.get("/")
    async with serving(FakeEngine(), served_model_name="another-one") as server:
        there = await server.client.get("/")
    assert here.content == there.content
    assert here.headers["etag"] == there.headers["etag"]


async def test_a_browser_asks_each_time_and_gets_it_once() -> None:
    first = await page()
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = await page(headers={"If-None-Match": known})
        assert again.status_code == 304
        assert again.content == b""
        assert again.headers["etag"] == first.headers["etag"]
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert (await page(headers={"If-None-Match": '"other"'})).status_code == 200


async def test_other_methods_are_refused() -> None:
    assert (await page(method="POST")).status_code == 405


async def test_it_can_be_switched_off() -> None:
    async with serving(page=False) as server:
        assert (await server.client.get("/")).status_code == 404
        assert (await server.client.head("/")).status_code == 404
        assert (await server.client.get("/v1/models")).status_code == 200


def test_the_readme_shows_it() -> None:
    readme = Path(__file__).parents[3] / "aengine" / "http" / "README.md"
    (name,) = re.findall(r"!\[The page.*?\]\((.*?)\)", readme.read_text())
    picture = (readme.parent / name).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_long_conversation_is_walked_in_linear_time() -> None:
    script = (PARTS / "conversations" / "tree.js").read_text(encoding="utf-8")
    script += """
        const N = 20000;
        const all = Array.from({ length: N }, (_, i) => (
          { id: `${i}`, parent: i ? `${i - 1}` : null, role: i % 2 ? "assistant" : "user", created: i, version: 0 }));
        const long = new Conversation({ leaf: `${N - 1}` }, [...all].reverse());
        long.merge(all);
        const begin = performance.now();
        long.select(long.messages.get("0"));
        const shown = long.path();
        const branches = shown.map((one) => long.siblings(one).length);
        const again = long.add("0", "assistant", "more", { id: "again" });
        const seconds = (performance.now() - begin) / 1000;
        const two = long.siblings(again).map((one) => one.id);
        const most = Math.max(...branches);
        console.log(JSON.stringify({ seconds, shown: shown.length, first: shown[0].id, most, two }));
    """
    run = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(run.stdout)
    assert found.pop("seconds") < 2
    assert found == {"shown": 20000, "first": "0", "most": 1, "two": ["1", "again"]}


STAND_IN = """
    const nodes = new Map();
    const document = { hidden: true };
    const byId = (id) => nodes.get(id) ?? nodes.set(id, { style: {} }).get(id);
    const show = (id, value) => (byId(id).textContent = value);
    const whole = (value) => `${value}`;
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({}, [True, "–", "–"]),
        ({"drafted_tokens": 0, "accepted_tokens": 0, "verifications": 0}, [False, "–", "–"]),
        ({"drafted_tokens": 300, "accepted_tokens": 160, "verifications": 100}, [False, "53 %", "2.60"]),
    ],
)
@pytest.mark.parametrize("replicas", [[], ["one", "two"]])
def test_the_view_of_the_engine_shows_what_was_accepted(
    values: dict[str, int], shown: list[object], replicas: list[str]
) -> None:
    text = "# HELP aengine_ready Whether.\naengine_ready 1.0\n" + "".join(
        f'aengine_speculation_{name}_total{{proposer="mtp"}} {value}.0\n' for name, value in values.items()
    )
    if replicas:
        text = merge_metrics(dict.fromkeys(replicas, text))
    script = STAND_IN + (PARTS / "panel" / "engine.js").read_text(encoding="utf-8")
    script += f"""
        showEngine(readMetrics({json.dumps(text)}));
        const texts = ["accepted", "accepted-length"].map((id) => byId(id).textContent);
        console.log(JSON.stringify([byId("speculation").hidden, ...texts]));
    """
    run = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(run.stdout) == shown
