"""The queue with adapters: no sequence is delayed by another's adapter, and each adapter gets its turn."""

from __future__ import annotations

from aengine.scheduling.addons.adapter_queue import AdapterQueue
from aengine.scheduling.sequence import LoadedAdapter, Phase, Sequence
from tests.scheduling.stepping import Stepper, prompt_of
from tests.scheduling.test_scheduling_cost import calls


def queue_of(stepper: Stepper) -> AdapterQueue:
    assert stepper.adapters is not None
    return stepper.adapters


def run(stepper: Stepper) -> None:
    stepper.run()
    stepper.check_outputs()


def ask(stepper: Stepper, adapter: LoadedAdapter | None, arrival: float = 0.0, **options: int) -> Sequence:
    return stepper.add(prompt_of(4), adapter=adapter, arrival=arrival, **options)


def test_a_sequence_enters_once_its_adapter_is_there() -> None:
    stepper = Stepper(places=1, load_steps=3)
    waiting = ask(stepper, stepper.adapter())
    for _ in range(3):
        stepper.step()
        assert waiting.phase is Phase.WAITING
    stepper.step()
    assert stepper.in_flight[-1].new_rows[0].adapter == 1
    run(stepper)


def test_others_enter_meanwhile() -> None:
    stepper = Stepper(places=1, load_steps=5)
    ask(stepper, stepper.adapter())
    plain = ask(stepper, None)
    stepper.step()
    assert plain.row >= 0
    run(stepper)


def test_adapters_come_in_the_order_of_the_queue_ahead_of_rows() -> None:
    stepper = Stepper(places=3, max_rows=1, load_steps=1)
    adapters = [stepper.adapter() for _ in range(3)]
    running = ask(stepper, None, max_tokens=30)
    for place in (2, 0, 1):
        ask(stepper, adapters[place], arrival=float(place))
    came: list[LoadedAdapter] = []
    while len(came) < 3:
        stepper.step()
        came += [adapter for adapter in adapters if adapter.ready and adapter not in came]
    assert came == adapters
    assert running.phase is Phase.RUNNING
    run(stepper)


def test_the_least_recently_used_adapter_without_requests_is_evicted() -> None:
    stepper = Stepper(places=3)
    adapters = [stepper.adapter() for _ in range(4)]
    for adapter in (*adapters[:3], adapters[0]):
        ask(stepper, adapter)
        run(stepper)
    ask(stepper, adapters[3])
    run(stepper)
    assert [bool(adapter.place) for adapter in adapters] == [True, False, True, True]
    assert (queue_of(stepper).loads, queue_of(stepper).evictions) == (4, 1)


def test_an_adapter_stays_until_no_step_names_it() -> None:
    """A place is free after the commit of the last step in flight, not after the one that ends the sequence."""
    stepper = Stepper(places=1, load_steps=0)
    first, second = stepper.adapter(), stepper.adapter()
    ask(stepper, first, max_tokens=3)
    ask(stepper, second)
    while not second.ready:
        stepper.step()  # the device checks that no step in flight names the place
    assert not first.place
    run(stepper)


def test_all_choices_and_a_preempted_one_hold_their_place() -> None:
    stepper = Stepper(num_pages=10, page_size=4, places=1, max_rows=4)
    adapter, other = stepper.adapter(), stepper.adapter()
    stepper.request(prompt_of(8), max_tokens=12, n=3, adapter=adapter)
    stepper.request(prompt_of(8, first=1), max_tokens=12, adapter=other, arrival=1.0)
    run(stepper)
    assert stepper.scheduler.counters.preemptions > 0
    assert adapter.rows == other.rows == 0


def test_a_rare_adapter_waits_for_two_rounds_of_the_popular_ones_at_most() -> None:
    stepper = Stepper(places=2, max_rows=8, load_steps=1)
    popular, rare = [stepper.adapter(), stepper.adapter()], stepper.adapter()
    running: list[Sequence] = []
    now = 0.0

    def keep_busy() -> None:
        nonlocal now
        running[:] = [one for one in running if one.phase is not Phase.FINISHED]
        while len(running) < 12:
            now += 1.0
            running.append(ask(stepper, popular[int(now) % 2], arrival=now, max_tokens=10))

    for _ in range(30):
        keep_busy()
        stepper.step()
    patient = ask(stepper, rare, arrival=now, max_tokens=1)
    turns = 0
    while patient.row < 0 and patient.phase is Phase.WAITING:
        keep_busy()
        stepper.step()
        turns += 1
    assert turns < 2 * 12 + 6  # the duration of two outputs and of loading
    run(stepper)


def test_popular_ones_have_their_turn_again() -> None:
    """Adapters whose requests never stop are served equally."""
    stepper = Stepper(places=2, max_rows=4, load_steps=1)
    adapters = [stepper.adapter() for _ in range(6)]
    served = dict.fromkeys(adapters, 0)
    open_: dict[LoadedAdapter, Sequence] = {}
    now = 0.0
    for _ in range(600):
        for adapter in adapters:
            if adapter not in open_ or open_[adapter].phase is Phase.FINISHED:
                served[adapter] += adapter in open_
                now += 1.0
                open_[adapter] = ask(stepper, adapter, arrival=now, max_tokens=6)
        stepper.step()
    run(stepper)
    assert min(served.values()) > 10
    assert max(served.values()) - min(served.values()) <= 2


def test_adapters_do_not_delay_requests_without_one() -> None:
    stepper = Stepper(places=1, max_rows=2, load_steps=1)
    for _ in range(20):
        ask(stepper, stepper.adapter(), max_tokens=10)
    plain = ask(stepper, None, arrival=1.0)
    stepper.step()
    assert plain.row >= 0
    run(stepper)


def test_sequences_of_one_adapter_enter_together() -> None:
    """Sequences of one adapter run together, so that it is not loaded for each of them."""
    stepper = Stepper(num_pages=4000, places=4, max_rows=64, load_steps=1)
    adapters = [stepper.adapter() for _ in range(20)]
    for number in range(100):
        ask(stepper, adapters[number % 20], arrival=float(number))
    run(stepper)
    assert queue_of(stepper).loads <= 30


def test_by_rank_where_rows_are_short() -> None:
    stepper = Stepper(places=2, max_rows=1, load_steps=1)
    adapters = [stepper.adapter() for _ in range(4)]
    sequences = [ask(stepper, adapters[number % 4], arrival=float(number), max_tokens=6) for number in range(12)]
    order: list[int] = []
    while not stepper.scheduler.idle:
        stepper.step()
        order += [place for place, one in enumerate(sequences) if one.row >= 0 and place not in order]
    assert order == list(range(12))


def test_lower_priority_values_come_first_among_adapters() -> None:
    stepper = Stepper(places=1, max_rows=1, load_steps=1)
    first, second = stepper.adapter(), stepper.adapter()
    late = ask(stepper, first, arrival=0.0, priority=2)
    early = ask(stepper, second, arrival=1.0)
    while early.row < 0:
        assert late.row < 0
        stepper.step()
    run(stepper)


def test_an_adapter_that_cannot_be_brought_leaves_its_place_to_others() -> None:
    stepper = Stepper(places=1)
    broken, sound = stepper.adapter(), stepper.adapter()
    failed = ask(stepper, broken)
    served = ask(stepper, sound, arrival=1.0)
    stepper.begin_loads()
    stepper.fail_load()
    assert failed.phase is Phase.FINISHED
    run(stepper)
    assert stepper.got[served].finish_reason == "length"


def test_adapters_without_requests_are_loaded_only_into_empty_places() -> None:
    stepper = Stepper(places=2, load_steps=0)
    adapters = [stepper.adapter() for _ in range(3)]
    for adapter in adapters:
        queue_of(stepper).preload(adapter)
    for _ in range(4):
        stepper.advance_loads()
    assert [adapter.ready for adapter in adapters] == [True, True, False]


def test_an_unloaded_one_gives_its_place_back_when_the_last_one_is_done() -> None:
    stepper = Stepper(places=1, load_steps=0)
    adapter = stepper.adapter()
    ask(stepper, adapter, max_tokens=4)
    while not stepper.scheduler.idle:
        assert not queue_of(stepper).forget(adapter)
        stepper.step()
    assert queue_of(stepper).forget(adapter)
    assert not adapter.place


def test_a_step_costs_the_same_however_many_wait_for_adapters() -> None:
    def cost(waiting: int) -> int:
        stepper = Stepper(num_pages=1000, places=2, max_rows=4, max_queue=10_000, lookahead=0)
        adapters = [stepper.adapter() for _ in range(40)]
        for number in range(waiting):
            ask(stepper, adapters[number % 40], arrival=float(number), max_tokens=40)
        for _ in range(8):
            stepper.step()
        return calls(stepper.scheduler.schedule)

    assert cost(80) == cost(4000)


def test_room_for_adapters_costs_a_step_without_them_nothing() -> None:
    def cost(places: int) -> int:
        stepper = Stepper(num_pages=1000, places=places, lookahead=0)
        for _ in range(8):
            ask(stepper, None, max_tokens=40)
        for _ in range(4):
            stepper.step()
        return calls(stepper.scheduler.schedule)

    assert cost(8) == cost(0)


def test_others_may_join_a_claimed_place_until_its_rows_have_left() -> None:
    stepper = Stepper(places=1, load_steps=0)
    popular, rare = stepper.adapter(), stepper.adapter()
    holder = ask(stepper, popular, max_tokens=12)
    while holder.row < 0:
        stepper.step()
    patient = ask(stepper, rare, arrival=1.0)
    stepper.step()
    joins = ask(stepper, popular, arrival=2.0, max_tokens=20)
    stepper.step()
    assert joins.row >= 0
    while holder.row >= 0:
        stepper.step()
    late = ask(stepper, popular, arrival=3.0)
    while patient.row < 0:
        assert late.row < 0
        stepper.step()
    run(stepper)
