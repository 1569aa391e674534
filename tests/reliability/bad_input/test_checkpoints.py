"""A checkpoint with a hostile chat template: chats are refused soon and clearly, and everything else works."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aengine.model.loading.hub import resolve_model
from aengine.text.template import rendering
from tests.reliability.bad_input.hostile import Hostile, hostile_demo
from tests.reliability.bad_input.meanwhile import Meanwhile
from tests.text.template.test_hostile_templates import BOMBS, ESCAPES, OTHERS

CHAT = "/v1/chat/completions"
SECONDS = 0.5  # that a rendering may take; five as it is shipped
ATTACKS = ESCAPES | BOMBS | OTHERS


def write_checkpoint(folder: Path, template: str) -> Path:
    """The demo model with another chat template."""
    folder.mkdir()
    for file in resolve_model(None, None).iterdir():
        if file.is_file() and file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((resolve_model(None, None) / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    """All attacks in one template; the first message says which."""
    branches = [f"{{% if messages[0].content == {name!r} %}}{source}{{% endif %}}" for name, source in ATTACKS.items()]
    folder = write_checkpoint(tmp_path_factory.mktemp("poisoned") / "checkpoint-of-mallory", "".join(branches))
    with pytest.MonkeyPatch.context() as patch, hostile_demo(model=str(folder)) as hostile:
        patch.setattr(rendering, "RENDER_SECONDS", SECONDS)
        yield hostile
        hostile.settled()


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_by_the_template(poisoned: Hostile, name: str) -> None:
    messages = [{"role": "user", "content": name}]
    with Meanwhile(poisoned) as meanwhile:
        began = time.monotonic()
        answer = poisoned.post(CHAT, {"messages": messages})
        took = time.monotonic() - began
    assert took < SECONDS + 15  # the machine has others to serve
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages"
    assert "chat template" in error["message"] or error["message"] == "done"  # the template's own word
    assert error["code"] in (None, "chat_template_refused")
    assert error["type"] == "invalid_request_error"
    assert meanwhile.worst < 5


def test_other_endpoints_say_the_same(poisoned: Hostile) -> None:
    for name, code in (("class", "chat_template_refused"), ("range", None)):
        body = {"messages": [{"role": "user", "content": name}]}
        for endpoint in ("/generate", "/tokenize", CHAT):
            error = poisoned.refused(endpoint, body, "messages", "chat template")
            assert error["code"] == code
    assert (
        "checkpoint-of-mallory: its chat template does something forbidden"
        in poisoned.post(CHAT, {"messages": [{"role": "user", "content": "class"}]}).json()["error"]["message"]
    )


@pytest.mark.slow
def test_many_that_loop_for_ever_leave_room_for_prompts(poisoned: Hostile) -> None:
    """More templates at once than there are threads."""
    body = {"messages": [{"role": "user", "content": "nested loops"}]}
    with Meanwhile(poisoned, CHAT, body, clients=12) as meanwhile:
        for _ in range(5):
            asked = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0, "stream": False}
            assert poisoned.post("/generate", asked).json()["text"] == " Paris."
    assert meanwhile.worst < 5
    assert set(meanwhile.statuses) == {400}
