"""Errors after which a device can continue, and errors after which it cannot."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque

import pytest
import torch

from aengine.errors import DeviceLostError
from aengine.runtime.cuda.lost import is_lost

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.runtime.cuda import clock
from aengine.runtime.cuda.runner import CudaRunner, CudaStep, PendingOutcome
from aengine.runtime.step.executor import Outcome


def accelerator_error(code: int | None) -> torch.AcceleratorError:
    error = torch.AcceleratorError("CUDA error")
    if code is not None:
        error.error_code = code  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("code", [700, 702, 710, 715, 716, 719, 999, None])
def test_faults_of_the_context_stay(code: int | None) -> None:
    assert is_lost(accelerator_error(code))


@pytest.mark.parametrize(
    "error",
    [*(accelerator_error(code) for code in (1, 2, 9, 701)), torch.OutOfMemoryError("too much"), RuntimeError("Triton")],
)
def test_errors_of_one_call_pass(error: Exception) -> None:
    assert not is_lost(error)


class Stream:
    def __init__(self, answer: Exception | None) -> None:
        self._answer = answer

    def query(self) -> bool:
        if self._answer is not None:
            raise self._answer
        return True


@pytest.mark.parametrize("dead", [True, False])
def test_a_cuda_runner_asks_the_device_whatever_library_raised(dead: bool) -> None:
    runner = CudaRunner.__new__(CudaRunner)  # the rest of one takes a GPU
    runner._streams = [Stream(accelerator_error(719) if dead else None)]  # type: ignore[list-item]
    with (
        pytest.raises(RuntimeError if not dead else DeviceLostError, match="Triton" if not dead else "lost"),
        runner.device_errors(),
    ):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


@pytest.mark.anyio
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_gpu_that_waited_in_vain_for_another_loses_the_device(rank: int) -> None:
    runner = CudaRunner.__new__(CudaRunner)
    runner._streams = [Stream(None), Stream(None)]  # type: ignore[list-item]
    step = CudaStep.__new__(CudaStep)
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    failed = torch.tensor([rank == 0, rank == 1], dtype=torch.int32)
    step._runner, step._pending = runner, PendingOutcome(done, Outcome(None), failed)
    with pytest.raises(DeviceLostError, match="waited in vain") as raised:
        await step.result()
    assert is_lost(raised.value)


def test_a_byte_that_no_host_function_will_send_is_dropped() -> None:
    """Left in its FILE it would come with the byte of a later step, whose result would be read too early."""
    pipe = clock.BytePipe()
    flush = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(pipe.flush.value)
    try:
        first = pipe.load()
        pipe.unload(first)
        while (file := pipe.load()) != first:
            flush(file)
        assert os.read(pipe.read_end, 64) == b"x" * (clock.FILES - 1)
        flush(first)
        assert os.read(pipe.read_end, 64) == b"x"
    finally:
        pipe.close()


@pytest.mark.parametrize("failing", ["stream", "clock"])
def test_closing_a_runner_whose_device_is_lost_closes_the_rest_as_well(failing: str) -> None:
    closed: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            self.synchronize()

        def synchronize(self) -> None:
            if self.name == failing:
                raise accelerator_error(719)

    runner = CudaRunner.__new__(CudaRunner)
    runner._streams = [Part("stream")]  # type: ignore[list-item]
    runner._clock, runner._executor = Part("clock"), Part("executor")  # type: ignore[assignment]
    with pytest.raises(torch.AcceleratorError):
        runner.close()
    assert closed == ["clock", "executor"]
    assert "_executor" not in vars(runner)


class Event:
    def __init__(self, happened: bool) -> None:
        self._happened = happened

    def query(self) -> bool:
        return self._happened


@pytest.mark.anyio
@pytest.mark.parametrize("lost", [True, False])
async def test_a_step_of_which_one_gpu_gave_up_does_not_wait_for_the_silent_one(lost: bool) -> None:
    watch = clock.DeviceClock.__new__(clock.DeviceClock)  # the rest of one takes a GPU
    loop = asyncio.get_running_loop()
    watch._loop, watch._streams = loop, []
    first, second = loop.create_future(), loop.create_future()
    said, unsaid = torch.tensor([int(lost), 0], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)
    one, none = [Event(True), Event(False)], [Event(False), Event(False)]
    watch._pending = deque([(one, said, first), (none, unsaid, second)])  # type: ignore[list-item]
    watch._check()
    if watch._watchdog is not None:
        watch._watchdog.cancel()
    assert [first.done(), second.done()] == [lost, lost]
    if lost:
        for future in (first, second):
            with pytest.raises(DeviceLostError, match="waited in vain"):
                await future
