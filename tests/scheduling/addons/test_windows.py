"""Window pages in the scheduler: taken chunk by chunk, freed when outside every window, enough for each sequence."""

from __future__ import annotations

from aengine.cache.windows import WindowRoom
from tests.scheduling.stepping import Stepper, prompt_of

WINDOW = 8
SIZE = 4
LEAST = WindowRoom.min_pages(WINDOW, SIZE)


def stepper(window_pages: int, **options: int) -> Stepper:
    return Stepper(page_size=SIZE, windows=WindowRoom(WINDOW, window_pages), **options)  # type: ignore[arg-type]


def most_held(subject: Stepper) -> int:
    windows = subject.device.windows
    assert windows is not None
    return windows.most


def test_a_long_prompt_is_read_in_as_many_pieces_as_there_are_pages_for() -> None:
    subject = stepper(LEAST)
    subject.add(prompt_of(400), 40)
    plans = subject.run()
    subject.check_outputs()
    chunks = [len(chunk.token_ids) for plan in plans for chunk in plan.prefill]
    assert sum(chunks) == 400
    assert max(chunks) <= (LEAST - 1) * SIZE
    assert most_held(subject) <= LEAST - 1


def test_an_output_holds_no_more_than_its_window() -> None:
    subject = stepper(100, max_step_tokens=8)
    subject.add(prompt_of(4), 300)
    held = 0
    assert subject.windows is not None
    while not subject.scheduler.idle:
        subject.step()
        held = max(held, subject.windows.figures()["window_pages_used"])
    assert held <= LEAST - 1
    subject.check_outputs()


def test_out_of_window_pages_the_youngest_is_preempted_and_all_end() -> None:
    subject = stepper(LEAST + 4)
    for first in range(6):
        subject.add(prompt_of(30 + first, first), 60, arrival=float(first))
    subject.run()
    subject.check_outputs()
    assert subject.scheduler.counters.generated_tokens == 6 * 60


def test_a_hit_takes_the_last_window_and_leaves_what_is_before() -> None:
    subject = stepper(40)
    subject.add(prompt_of(120), 1)
    subject.run()
    again = subject.add(prompt_of(120), 1)
    plan = subject.step()
    assert again.cached == 116
    assert plan is not None
    (row,) = plan.new_rows
    unseen = (116 + 1 - WINDOW) // SIZE
    assert list(row.window_pages[:unseen]) == [0] * unseen
    assert all(row.window_pages[unseen:])
    subject.run()
    subject.check_outputs()


def test_a_prompt_continues_where_others_diverged() -> None:
    subject = stepper(LEAST + 10)
    for own in range(4):
        sequence = subject.add([*prompt_of(80), *prompt_of(40, 1 + own)], 8, arrival=float(own))
        subject.run()
        assert (sequence.cached == 80) == (own > 0)
    subject.check_outputs()


def test_the_next_turn_finds_the_last_answer() -> None:
    subject = stepper(LEAST + 10)
    chat = prompt_of(50)
    for turn in range(6):
        sequence = subject.add(chat, 37)
        subject.run()
        assert turn == 0 or sequence.cached == (len(chat) - 8 - 1) // SIZE * SIZE
        chat = [*chat, *subject.got[sequence].token_ids, *prompt_of(8, 10 + turn)]
    subject.check_outputs()


def test_choices_share_the_window_that_they_begin_with() -> None:
    subject = stepper(40)
    subject.request(prompt_of(50), 20, n=4)
    subject.run()
    subject.check_outputs()


def test_a_stop_string_that_cuts_an_answer_short_leaves_a_window_before_the_cut() -> None:
    subject = stepper(40)
    sequence = subject.add(prompt_of(50), 100)
    while len(sequence.output) < 60:
        subject.step()
    subject.finish(sequence, len(sequence.output) - SIZE)
    chat = [*subject.got[sequence].prompt, *sequence.output]
    subject.run()
    again = subject.add([*chat, 1, 2, 3], 4)
    subject.run()
    assert again.cached is not None
    assert again.cached >= len(chat) // SIZE * SIZE - SIZE
    subject.check_outputs()
