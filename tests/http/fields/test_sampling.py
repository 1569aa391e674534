"""Every parameter at every generating endpoint: its effect on the demo model, and refused values."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.one_in import one_in

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PATHS: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": PROMPT, "stream": False, "temperature": 0, "max_tokens": 6},
    "/v1/completions": {"prompt": PROMPT, "temperature": 0, "max_tokens": 6},
    "/v1/chat/completions": {"messages": MESSAGES, "temperature": 0, "max_tokens": 6},
}
PERIOD = 13  # the id of "."

# parameter -> an accepted value
TAKEN: dict[str, Any] = {
    "model": "aengine-demo",
    "max_tokens": 3,
    "min_tokens": 2,
    "temperature": 1.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.1,
    "presence_penalty": -1.5,
    "frequency_penalty": 1.5,
    "logit_bias": {str(token_id): 0.5 for token_id in range(1024)},
    "seed": -7,
    "stop": [f"stop{i}" for i in range(16)],
    "stop_token_ids": [1, 2, 3],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "bad_words": ["London", "Rome"],
    "allowed_token_ids": [200, 201],
    "n": 3,
    "prompt_logprobs": 20,
    "speculation": False,
    "priority": -2,
    "cache_salt": "tenant",
    "user": "someone",
    "unknown_to_us": {"is": "ignored"},
}

# parameter -> refused values
REFUSED: dict[str, list[Any]] = {
    "max_tokens": [0, -1, "3", 1.5],
    "min_tokens": [-1, 7, "1"],
    "temperature": [-0.1, 2.1, "1"],
    "top_k": [-2, 0.5],
    "top_p": [0, -0.5, 1.1],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 1e5],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "logit_bias": [
        {str(i): 1 for i in range(1025)},
        {"1": 101},
        {"1": -101},
        {"99999999": 1},
        {"-1": 1},
        {"x": 1},
        [1],
    ],
    "seed": [2**63, -(2**63) - 1, 1.5],
    "stop": [["a"] * 17, [""], ["x" * 1025], 3],
    "stop_token_ids": [[-1], [10**7], [1] * 1025, "1"],
    "include_stop_str_in_output": ["yes"],
    "ignore_eos": [1],
    "skip_special_tokens": ["no"],
    "bad_words": [[""], [" "], ["x"] * 257, ["x" * 129], "word", [3]],
    "allowed_token_ids": [[], [-1], [10**7], "1", [1.5]],
    "n": [0, 129, "1"],
    "prompt_logprobs": [-1, 21, True],
    "speculation": ["off", 0, []],
    "priority": [2**63, "high", 0.5],
    "cache_salt": [3],
    "user": [3],
    "stream": ["yes", 1],
    "model": [3],
}
REFUSED_AT: dict[str, dict[str, list[Any]]] = {
    "/generate": {
        "max_tokens": [0, -1, 10**6, "3", 1.5],
        "logprobs": [-1, 21, True],
        "truncate_prompt_tokens": [0, -1],
        "prompt": [3, [], [-1], [10**7]],
    },
    "/v1/completions": {
        "logprobs": [-1, 21, True],
        "truncate_prompt_tokens": [0, -1],
        "suffix": ["and so on"],
        "best_of": [2, 0],
        "stream_options": [{"include_usage": True}, 3],
        "prompt": [3, [], [-1], [[10**7]], ["a", [1]], [[]], None],
        "echo": ["yes"],
    },
    "/v1/chat/completions": {
        "logprobs": [1],
        "top_logprobs": [-1, 21, 5],  # 5 without logprobs
        "stream_options": [{"include_usage": True}, 3],
        "max_completion_tokens": [0, -1],
        "messages": [[], [{"role": "nobody", "content": "a"}], None, "a"],
    },
}


def choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found = answer.get("choices", [answer])
    return [choice | {"text": choice.get("text", choice.get("message", {}).get("content"))} for choice in found]


def ask(demo: httpx2.Client, path: str, **given: Any) -> dict[str, Any]:
    response = demo.post(path, json=PATHS[path] | given)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(demo: httpx2.Client, path: str, **given: Any) -> str:
    return str(choices(ask(demo, path, **given))[0]["text"])


# /v1/completions has the same rules as /generate.
every_path = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow if path == "/v1/completions" else ()) for path in PATHS]
)


@pytest.mark.parametrize(
    "path", ["/generate", *(pytest.param(path, marks=pytest.mark.slow) for path in PATHS if path != "/generate")]
)
@pytest.mark.parametrize("name", one_in(3, TAKEN))
def test_it_is_taken(demo: httpx2.Client, path: str, name: str) -> None:
    assert choices(ask(demo, path, **{name: TAKEN[name]}))


@every_path
def test_null_is_not_given(demo: httpx2.Client, path: str) -> None:
    nulls = dict.fromkeys(name for name in TAKEN if name not in ("max_tokens", "temperature"))
    assert text(demo, path, **nulls) == text(demo, path)


@every_path
def test_values_out_of_range_are_refused_by_name(demo: httpx2.Client, path: str) -> None:
    for name, values in (REFUSED | REFUSED_AT[path]).items():
        for value in values:
            response = demo.post(path, json=PATHS[path] | {name: value})
            said = f"{path} {name}={str(value)[:50]}: {response.text[:200]}"
            assert response.status_code == 400, said
            error = response.json()["error"]
            assert str(error["param"]).startswith(name), said
            assert name in error["message"], said


@every_path
def test_lengths(demo: httpx2.Client, path: str) -> None:
    assert ask(demo, path, max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    full = ask(demo, path, max_tokens=40)
    assert choices(full)[0]["finish_reason"] == "stop"
    ended_at = full["usage"]["completion_tokens"]
    beyond = ended_at + 3
    assert ask(demo, path, max_tokens=beyond, min_tokens=beyond)["usage"]["completion_tokens"] == beyond
    assert ask(demo, path, max_tokens=beyond, ignore_eos=True)["usage"]["completion_tokens"] == beyond


@every_path
def test_stops(demo: httpx2.Client, path: str) -> None:
    assert "." not in text(demo, path, stop=".", max_tokens=40)
    for name in ("include_stop", "include_stop_str_in_output"):
        assert text(demo, path, stop=["."], max_tokens=40, **{name: True}).endswith(".")
    assert choices(ask(demo, path, stop_token_ids=[PERIOD], max_tokens=40))[0]["finish_reason"] == "stop"
    assert "." not in text(demo, path, stop_token_ids=[PERIOD], max_tokens=40)


@every_path
def test_words_and_biases(demo: httpx2.Client, path: str) -> None:
    assert "Paris" in text(demo, path)
    assert "Paris" not in text(demo, path, bad_words=["Paris"])
    assert "Paris" not in text(demo, path, logit_bias={"1932": -100})
    assert set(text(demo, path, logit_bias={str(PERIOD): 100})) == {"."}


@every_path
def test_several_and_seeds(demo: httpx2.Client, path: str) -> None:
    loose = {"temperature": 2, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    texts = [choice["text"] for choice in choices(ask(demo, path, n=3, **loose))][-3:]
    assert len(set(texts)) == 3
    assert texts[0] == text(demo, path, **loose)
    assert text(demo, path, n=1, temperature=2, top_k=1) == text(demo, path)


@every_path
def test_cached_tokens_are_reported_and_salts_separate_the_cache(demo: httpx2.Client, path: str) -> None:
    long = "one two three four five six seven " * 10
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": long}]} if "chat" in path else {"prompt": long}

    def cached(salt: str) -> int:
        usage = ask(demo, path, cache_salt=salt, **prompt)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(f"a{path}") == 0
    assert cached(f"a{path}") > 16
    assert cached(f"b{path}") == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_chunk(demo: httpx2.Client, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = demo.post(path, json=PATHS[path] | {"stream": True, "stream_options": options})
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    usages = [httpx2.Response(200, text=event).json()["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[-1] == 6
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert len({usage["prompt_tokens"] for usage in usages}) == 1


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_the_last_tokens_of_a_prompt(demo: httpx2.Client, path: str) -> None:
    assert ask(demo, path, prompt=f"word {PROMPT}", truncate_prompt_tokens=5)["usage"]["prompt_tokens"] == 5
    ids = demo.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert text(demo, path, prompt=[7, 7, 7, *ids], truncate_prompt_tokens=len(ids)) == text(demo, path)
    assert text(demo, path, truncate_prompt_tokens=1000) == text(demo, path)


def test_echo(demo: httpx2.Client) -> None:
    path = "/v1/completions"
    plain, ids = text(demo, path), demo.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert text(demo, path, echo=True) == PROMPT + plain
    assert text(demo, path, echo=True, prompt=ids) == PROMPT + plain
    answer = ask(demo, path, echo=True, prompt=[PROMPT, "One two"], n=2)
    for choice, prompt in zip(answer["choices"], [PROMPT, PROMPT, "One two", "One two"], strict=True):
        assert choice["text"].startswith(prompt)
    response = demo.post(path, json=PATHS[path] | {"echo": True, "stream": True})
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line][:-1]
    pieces = [httpx2.Response(200, text=event).json()["choices"][0]["text"] for event in events]
    assert pieces[0].startswith(PROMPT)
    assert "".join(pieces) == PROMPT + plain


def test_best_of_is_n_or_nothing(demo: httpx2.Client) -> None:
    assert len(ask(demo, "/v1/completions", n=2, best_of=2)["choices"]) == 2


@every_path
def test_prompt_logprobs(demo: httpx2.Client, path: str) -> None:
    answer = ask(demo, path, prompt_logprobs=2, n=2)
    reported = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": PROMPT}
    ids = demo.post("/tokenize", json=prompt).json()["tokens"]
    assert len(reported) == len(ids) == answer["usage"]["prompt_tokens"]
    assert reported[0] is None
    for token_id, candidates in zip(ids[1:], reported[1:], strict=True):
        own = candidates[str(token_id)]
        assert own["logprob"] <= 0
        assert len(candidates) in (2, 3)
        assert sorted(one["rank"] for one in candidates.values())[:2] == [1, 2]
        assert demo.post("/detokenize", json={"tokens": [token_id]}).json()["prompt"] == own["decoded_token"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_come_only_with_a_whole_answer(demo: httpx2.Client, path: str) -> None:
    response = demo.post(path, json=PATHS[path] | {"prompt_logprobs": 1, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_generate_has_prompt_logprobs_in_its_first_event(demo: httpx2.Client) -> None:
    body = {"prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 3, "ignore_eos": True}
    events = [line.removeprefix("data: ") for line in demo.post("/generate", json=body).text.split("\n\n") if line]
    parsed = [httpx2.Response(200, text=event).json() for event in events[:-1]]
    assert ["prompt_logprobs" in event for event in parsed] == [True] + [False] * (len(parsed) - 1)


def test_an_echo_with_logprobs(demo: httpx2.Client) -> None:
    path = "/v1/completions"
    given: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 3}
    (choice,) = ask(demo, path, **given)["choices"]
    reported = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert "".join(reported["tokens"]) == choice["text"]
    assert reported["token_logprobs"][0] is reported["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in reported["token_logprobs"][1:])
    assert all(len(top) in (2, 3) for top in reported["top_logprobs"][1:])
    offsets = [choice["text"][start:] for start in reported["text_offset"]]
    assert all(rest.startswith(token) for rest, token in zip(offsets, reported["tokens"], strict=True))
    own = ask(demo, path, logprobs=2, max_tokens=3)["choices"][0]["logprobs"]["token_logprobs"]
    assert reported["token_logprobs"][-3:] == pytest.approx(own, abs=1e-3)

    response = demo.post(path, json=PATHS[path] | given | {"stream": True})
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line][:-1]
    streamed = [httpx2.Response(200, text=event).json()["choices"][0] for event in events]
    assert [token for piece in streamed for token in piece["logprobs"]["tokens"]] == reported["tokens"]


def test_an_echo_alone(demo: httpx2.Client) -> None:
    """A text is scored by its logprobs, without generating."""
    answer = ask(demo, "/v1/completions", prompt=[PROMPT, "One two three"], echo=True, logprobs=1, max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == [PROMPT, "One two three"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["usage"]["completion_tokens"] == 0
    for choice in answer["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
