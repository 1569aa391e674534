"""The simulation of routing: every page is accounted for, and by prefix more is found than at random."""

from __future__ import annotations

import pytest

from bench.routing import Simulation


def simulated(policy: str, requests: int, lose: bool = False) -> Simulation:
    simulation = Simulation(policy, replicas=8, requests=requests, load=16.0, lose=lose, seed=1)
    simulation.run()
    return simulation


def test_by_prefix_more_is_found_and_the_first_token_comes_sooner_than_at_random() -> None:
    prefix, at_random = simulated("prefix", 1000).figures(), simulated("random", 1000).figures()
    assert (prefix["found"] or 0) > 0.9 > (at_random["found"] or 1)
    assert (prefix["ttft_ms_p99"] or 1) < (at_random["ttft_ms_p99"] or 0)


@pytest.mark.slow
def test_replicas_that_are_lost_are_replaced_and_nothing_is_sent_to_them_meanwhile() -> None:
    simulation = simulated("prefix", 4000, lose=True)
    assert simulation.lost > 0
    assert len(simulation.policy.router) == 8  # type: ignore[attr-defined]
    simulation.policy.router.check_integrity()  # type: ignore[attr-defined]
    for replica in simulation.replicas:
        replica.tree.check_integrity()
        replica.allocator.check_integrity()
