"""The number of drafts follows their acceptance and the time of steps."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from aengine.scheduling.planning.drafting import WAITED, Drafting
from aengine.step_cost import FORGOTTEN_AFTER, FREE, MOST_TRIALS, SURE, MeasuredCost, StepCost
from aengine.step_plan import StepPlan
from tests.scheduling.planning.simulated import (
    BLOCKS,
    BLOCKS_COST,
    CPU,
    CPU_COST,
    H200,
    H200_COST,
    PADDED,
    PADDED_COST,
    Device,
    Simulation,
    row,
)
from tests.scheduling.stepping import Seen, Stepper, prompt_of

LARGE = pytest.param(256, marks=pytest.mark.slow)
DEVICES = {"H200": (H200, H200_COST), "padded": (PADDED, PADDED_COST), "CPU": (CPU, CPU_COST)}


@pytest.mark.parametrize("rate", [0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 16, LARGE])
@pytest.mark.parametrize("name", DEVICES)
def test_it_is_nearly_as_fast_as_the_best_fixed_number(name: str, rows: int, rate: float) -> None:
    device, cost = DEVICES[name]
    simulation = Simulation(device, cost, rows, lambda step, index: rate)
    simulation.run(300)
    reached = simulation.run(4000 // rows + 600)
    assert reached >= 0.98 * device.best_rate(rows, rate, 5), dict(simulation.seen)
    assert reached >= 0.98 * device.plain_rate(rows)


@pytest.mark.parametrize("name", DEVICES)
def test_the_first_steps_cost_little_if_no_draft_is_ever_accepted(name: str) -> None:
    device, cost = DEVICES[name]
    simulation = Simulation(device, cost, 1, lambda step, index: 0)
    assert simulation.run(3000) >= 0.98 * device.plain_rate(1)


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def test_padded_steps_cost_little_if_no_draft_is_ever_accepted(rows: int) -> None:
    """Sequences come and go. A probe takes as long in all rows, so there are few of them."""
    simulation = Simulation(PADDED, PADDED_COST, rows, lambda step, index: 0, most=3, life=256)
    simulation.run(160)
    assert simulation.run(1500) > 0.985 * PADDED.plain_rate(rows)


@pytest.mark.parametrize("rows", [1, 16])
def test_times_that_vary_cost_little(rows: int) -> None:
    simulation = Simulation(H200, H200_COST, rows, lambda step, index: 0, noise=0.03, life=300, gap=0.5)
    assert simulation.run(3000) >= 0.97 * H200.plain_rate(rows)


@pytest.mark.parametrize("slowness", [0.5, 2.0])
@pytest.mark.parametrize("rate", [0.3, 0.8])
@pytest.mark.parametrize("is_off", [False, True])
def test_a_device_whose_speed_changes_costs_little(rate: float, slowness: float, is_off: bool) -> None:
    """It is slower or faster for a while. It changes while requests draft, or while they have switched drafts off."""
    simulation = Simulation(CPU, CPU_COST, 1, lambda step, index: rate, most=3, noise=0.03)
    simulation.run(500)
    for changed in (slowness, 1.0):
        simulation.sequences[0].speculates = not is_off
        simulation.run(50)
        simulation.slowness = changed
        simulation.run(250)
        simulation.sequences = [row()]
        reached = simulation.run(300)
        assert reached > 0.95 * CPU.best_rate(1, rate, 3), dict(simulation.seen)


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 33])
def test_no_batch_size_falls_off_a_cliff(rows: int) -> None:
    """A step of more rows never brings fewer tokens per time than one of fewer rows."""
    fewer, more = (Simulation(H200, H200_COST, count, lambda step, index: 0.6) for count in (rows, rows + 1))
    assert more.run(400) > 0.97 * fewer.run(400)


def test_the_number_of_drafts_grows_when_they_begin_to_be_accepted() -> None:
    simulation = Simulation(H200, H200_COST, 4, lambda step, index: 0.9 if step >= 1500 else 0.0)
    simulation.run(1500)
    assert simulation.seen[-1] > 1200
    simulation.run(800)
    simulation.run(200)
    assert min(simulation.seen) >= 3


def test_the_number_of_drafts_shrinks_and_ends_when_they_are_refused() -> None:
    simulation = Simulation(H200, H200_COST, 4, lambda step, index: 0.9 if step < 500 else 0.0)
    simulation.run(500)
    assert simulation.seen[5] > 350
    simulation.run(150)
    simulation.run(200)
    assert simulation.seen[-1] > 160


@pytest.mark.parametrize(("rate", "gain", "drafts"), [(0.535, 1.015, False), (0.6, 1.06, True)])
def test_drafts_that_gain_less_than_prompts_lose_are_not_made(rate: float, gain: float, drafts: bool) -> None:
    device = replace(H200, row=0.0)
    assert abs(device.best_rate(96, rate, 1) / device.plain_rate(96) - gain) < 0.01
    simulation = Simulation(device, replace(H200_COST, context=0.0), 96, lambda step, index: rate, most=1)
    simulation.run(600)
    simulation.run(200)
    assert (simulation.seen[1] > 100) == drafts


def test_a_batch_that_shrinks_drafts_again() -> None:
    """Drafts do not pay in the large batch. What sequences there accept is remembered."""
    simulation = Simulation(CPU, CPU_COST, 48, lambda step, index: 0.7, life=300)
    simulation.run(600)
    assert simulation.seen[-1] > 450
    simulation.rows, simulation.sequences = 1, [row()]
    simulation.run(40)
    assert simulation.seen[-1] == 0
    assert max(simulation.seen) > 1


@pytest.mark.parametrize("steps", [400, 402, 404, 406])
def test_a_batch_that_grows_stops_drafting_at_once(steps: int) -> None:
    """Drafts pay for one row, and not for 48."""
    simulation = Simulation(CPU, CPU_COST, 1, lambda step, index: 0.7)
    simulation.run(steps)
    assert max(simulation.newest) > 1
    simulation.rows, simulation.sequences = 48, [row() for _ in range(48)]
    simulation.run(8)
    assert max(simulation.seen) <= 0


@pytest.mark.parametrize("rate", [0.0, 0.7, 0.9])
@pytest.mark.parametrize("rows", [1, 16, 256])
def test_a_proposer_of_blocks_drafts_about_as_many_as_pay(rows: int, rate: float) -> None:
    """A block costs the same for one draft as for many, while the step reads weights."""
    assert 0 < BLOCKS_COST.proposing(1, 1) < BLOCKS_COST.proposing(1, 15) < 1.02 * BLOCKS_COST.proposing(1, 1)
    assert BLOCKS_COST.proposing(256, 15) > 5 * BLOCKS_COST.proposing(256, 1)
    assert BLOCKS_COST.proposing(1, 0) == 0
    simulation = Simulation(BLOCKS, BLOCKS_COST, rows, lambda step, index: rate, most=15)
    simulation.run(400)
    assert simulation.run(800) > 0.97 * BLOCKS.best_rate(rows, rate, 15)


def test_rows_whose_drafts_are_refused_verify_none() -> None:
    device = Device(((1, 1.0), (16, 1.1), (96, 3.0)), 0.0, 0.02, 0.02)
    simulation = Simulation(device, StepCost(20, 0.02, 0.02), 16, lambda step, index: 0.95 if index < 8 else 0.0)
    simulation.run(600)
    drafts = [0] * 16
    for _ in range(64):
        simulation.run(1)
        drafts = [count + more for count, more in zip(drafts, simulation.newest, strict=True)]
    assert min(drafts[:8]) > 4 * max(drafts[8:])


def test_a_cost_that_is_estimated_too_low_is_corrected_by_the_times_of_steps() -> None:
    believed = StepCost(free_tokens=1000, draft=0.01, reading=0.01)  # drafts look free
    simulation = Simulation(CPU, believed, 48, lambda step, index: 0.3)
    assert simulation.run(1500) > 0.95 * CPU.plain_rate(48)
    simulation = Simulation(CPU, StepCost(1000, 0.01, 0.01, is_measured=False), 48, lambda step, index: 0.3)
    assert simulation.run(500) < 0.8 * CPU.plain_rate(48)


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize(("rows", "rate"), [(2, 0.3), (16, 0.8), (48, 0.3)])
def test_it_is_corrected_in_batches_where_only_some_rows_draft(rows: int, rate: float, share: float) -> None:
    believed = StepCost(free_tokens=1000, draft=0.01, reading=0.01)
    simulation = Simulation(CPU, believed, rows, lambda step, index: rate)
    for sequence in simulation.sequences[: int(rows * share)]:
        sequence.speculates = False
    simulation.run(400)
    assert simulation.run(600) > 0.98 * CPU.plain_rate(rows)


def test_a_cost_that_is_estimated_too_high_is_corrected_too() -> None:
    believed = StepCost(free_tokens=60, draft=0.12, reading=0.06)
    simulation = Simulation(H200, believed, 24, lambda step, index: 0.8)
    simulation.run(300)
    assert simulation.run(600) > 0.97 * H200.best_rate(24, 0.8, 5)


def test_all_rows_of_a_step_verify_the_same_number_of_drafts() -> None:
    simulation = Simulation(H200, H200_COST, 16, lambda step, index: 0.6)
    simulation.run(300)
    uniform = 0
    for _ in range(200):
        simulation.run(1)
        uniform += len(set(simulation.newest)) == 1
    assert uniform > 180


def test_a_new_sequence_starts_with_the_acceptance_of_the_others() -> None:
    simulation = Simulation(H200, H200_COST, 16, lambda step, index: 0.9)
    simulation.run(300)
    simulation.sequences = [row()]
    simulation.rows = 1
    simulation.run(2)
    assert max(simulation.seen) == 5


# ---- in the scheduler -------------------------------------------------------------------------------------


def test_a_proposer_that_does_not_pay_does_not_run() -> None:
    stepper = Stepper(most_drafts=3, accepts=[0], step_cost=StepCost(is_measured=False))
    stepper.add(prompt_of(5), max_tokens=400)
    plans = stepper.run()
    idle = [plan for plan in plans if not plan.is_read]
    assert len(idle) > 0.7 * len(plans)
    assert all(plan.proposals == 0 for plan in idle)
    assert any(plan.drafts for plan in plans[200:])  # it is tried again now and then
    stepper.check_outputs()


def test_a_proposer_that_costs_nothing_to_read_reads_every_step() -> None:
    stepper = Stepper(most_drafts=3, accepts=[0], step_cost=StepCost(reading=0, is_measured=False))
    stepper.add(prompt_of(5), max_tokens=200)
    plans = stepper.run()
    assert all(plan.is_read for plan in plans)
    assert sum(bool(plan.drafts) for plan in plans[100:]) < 10


def test_a_proposer_does_not_run_for_requests_that_do_not_speculate() -> None:
    stepper = Stepper(most_drafts=3, accepts=[3], step_cost=StepCost(is_measured=False))
    stepper.add(prompt_of(5), max_tokens=100, speculates=False)
    plans = stepper.run()
    assert not any(plan.is_read for plan in plans[10:])


def test_nor_for_outputs_whose_grammar_takes_no_drafts() -> None:
    stepper = Stepper(most_drafts=3, accepts=[3], step_cost=StepCost(is_measured=False))
    [sequence] = stepper.request(prompt_of(5), max_tokens=100, grammar=True)
    assert isinstance(sequence.grammar, Seen)
    sequence.grammar.takes_drafts = False
    plans = stepper.run()
    assert not any(plan.is_read for plan in plans[10:])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shortage", [{"max_step_tokens": 8}, {"max_step_tokens": 10}, {"num_pages": 60}], ids=str)
def test_a_proposer_makes_no_drafts_for_which_there_is_no_room(shortage: dict[str, int], padded: bool) -> None:
    """The steps are as large as the batch, or the pool is so small that sequences are preempted."""
    stepper = Stepper(most_drafts=3, accepts=[3], step_cost=StepCost(padded=padded, is_measured=False), **shortage)
    for first in range(8):
        stepper.add(prompt_of(5, first), max_tokens=300)
    plans = stepper.run()
    made = sum(before.proposals > 0 for before in plans)
    in_vain = sum(before.proposals > 0 and not after.drafts for before, after in itertools.pairwise(plans))
    assert len(plans) > 200
    assert in_vain <= 5 + 0.1 * made
    stepper.check_outputs()


def test_drafts_that_have_too_little_room_become_fewer() -> None:
    stepper = Stepper(most_drafts=3, accepts=[3], step_cost=StepCost(is_measured=False), max_step_tokens=16)
    for first in range(8):
        stepper.add(prompt_of(5, first), max_tokens=100)
    plans = stepper.run()
    assert Counter((sum(plan.drafts), plan.proposals) for plan in plans).most_common(1)[0][0] == (8, 1)


def test_a_short_lack_of_room_leaves_no_gap() -> None:
    """A sequence of which the proposer has not read all tokens drafts worse until its end."""
    drafting, sequence = Drafting(3, StepCost(is_measured=False)), row()

    def are_read(steps: int, room: int) -> list[bool]:
        plans = [StepPlan(0, [], [], [], [], []) for _ in range(steps)]
        for plan in plans:
            drafting.begin([sequence], plan, room)
            sequence.proposed = plan.proposals
            drafting.observe(sequence, 3, 3)
        return [plan.is_read for plan in plans]

    assert all(are_read(100, room=3))
    assert all(are_read(WAITED - 10, room=0))
    assert all(are_read(20, room=3))
    assert sequence.proposed == 3
    assert not all(are_read(2 * WAITED, room=0))


def test_times_of_steps_reach_the_choice() -> None:
    """Drafts look free, and all are accepted; but steps with drafts take ten times as long."""
    cost = StepCost(free_tokens=1e6, draft=0.001, reading=0.001)
    stepper = Stepper(most_drafts=3, accepts=[3], step_cost=cost, lookahead=0)
    stepper.add(prompt_of(5), max_tokens=900)
    drafts = []
    while not stepper.scheduler.idle:
        plan = stepper.step()
        if plan is not None:
            stepper.scheduler.observe_time(plan, 0.1 if plan.drafts else 0.01)
            drafts.append(max(plan.drafts, default=0))
    assert sum(map(bool, drafts[:20])) > 10
    assert sum(map(bool, drafts[-200:])) < 40


def test_free_drafts_are_always_the_most() -> None:
    drafting, plan = Drafting(4, FREE), StepPlan(0, [], [], [], [], [])
    sequence = row()
    for _ in range(100):
        drafting.begin([sequence], plan, 4)
        sequence.proposed = plan.proposals
        drafting.observe(sequence, 4, 0)
    assert (plan.proposals, drafting.wanted(sequence)) == (4, 4)


def test_a_number_of_drafts_whose_time_is_forgotten_is_tried_again() -> None:
    cost = MeasuredCost(StepCost(free_tokens=10.0, draft=0.1, reading=0.1, context=0.0))

    def measure(drafts: int, steps: int) -> None:
        plan = StepPlan(step=0, new_rows=[], new_pages=[], decode=[0], prefill=[], page_copies=[], contexts=[5])
        plan.drafts, plan.proposals = [drafts] if drafts else (), drafts
        for _ in range(steps):
            cost.observe(plan, 0.01)

    measure(0, 1)
    for _ in range(MOST_TRIALS):
        assert cost.wants_trial(1, 2, 1)
        cost.note_trial(1, 2, 1)
    assert not cost.wants_trial(1, 2, 1)
    measure(2, SURE)
    assert not cost.wants_trial(1, 2, 1)
    measure(0, FORGOTTEN_AFTER)
    assert cost.wants_trial(1, 2, 1)
