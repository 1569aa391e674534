"""The load for routers."""

from __future__ import annotations

import httpx2


def test_the_load_counts_requests_and_their_tokens(demo: httpx2.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
    assert demo.get("/load").json() == {"server_load": 0}
    with demo.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
        assert demo.get("/load").json() == {"server_load": 1}
        (load,) = demo.get("/get_load").json()
        assert (load["dp_rank"], load["num_reqs"], load["num_waiting_reqs"]) == (0, 1, 0)
        assert load["num_tokens"] > 0
        (load,) = demo.get("/v1/loads?include=core").json()["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (1, 0, 1)
        assert 0 < load["token_usage"] <= load["num_used_tokens"] / load["max_total_num_tokens"] + 1e-3
