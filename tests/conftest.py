"""Async tests run on asyncio, the loop that the engine is built on.

Hypothesis has two profiles here, `quick` and `thorough` (`--hypothesis-profile thorough`). Both try the same
examples in every run; hypothesis' own, `--hypothesis-profile default`, tries others each time.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import inspect
import itertools
import os
import re

import httpcore2
import pytest
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings

from tests.covering import thin_out

# torch reads these when it is imported, here and in every process that a test starts. The models are so small that
# threads would mostly spin while they wait for each other, and on a busy machine ten times longer than they work. The
# engine sets its own number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Modules and tests are a million objects that stay. Scanning them in every collection took a sixth of all time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


if IN_WORKER := "PYTEST_XDIST_WORKER" in os.environ:
    # The report is complete by then. Freeing a million objects one by one would take another 5 seconds.
    atexit.register(os._exit, 0)
    # Large tensors are made and freed all the time. glibc gives them back to the kernel at once, and the page faults of
    # the next ones take half of the time of some tests on a virtual machine. Keep up to 1 GB instead.
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 2**26)  # M_TOP_PAD


def pytest_unconfigure() -> None:
    if not IN_WORKER:
        gc.unfreeze()  # otherwise extension modules report objects that are not collected at the end


# Every HTTP client reads the machine's certificates, for 20 ms, whether it will meet TLS or not.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

settings.register_profile(
    "quick",
    max_examples=8,  # the others among the slow ones, which run `thorough`
    deadline=None,  # the machine may be busy
    derandomize=True,
    database=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=100)
settings.load_profile("quick")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@functools.cache
def never_on_a_gpu(selection: str) -> bool:
    """Whether what -m selects leaves out every test that is marked as `gpu`, whatever else it is marked as."""
    others = set(re.findall(r"[a-z_]\w*", selection)) - {"and", "or", "not", "gpu"}
    selected = Expression.compile(selection or "gpu").evaluate
    marks = itertools.chain.from_iterable(itertools.combinations(others, count) for count in range(len(others) + 1))
    return not any(selected(lambda name, also=also: name == "gpu" or name in also) for also in marks)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module, obj: object) -> list[pytest.Item] | None:
    """Nothing of what -m leaves out in any case: half of all cases are for a GPU, and making them takes a second."""
    if inspect.isfunction(obj) and never_on_a_gpu(collector.config.option.markexpr):
        marks = [getattr(where, "pytestmark", ()) for where in (obj, collector.obj)]
        each = itertools.chain.from_iterable(mark if isinstance(mark, (list, tuple)) else [mark] for mark in marks)
        if any(mark.name == "gpu" for mark in each):
            return []
    return None


@pytest.hookimpl(trylast=True)  # of what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests first, led by the longest: while a worker is busy with one of minutes, the other does the rest."""
    thin_out(config, items)
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, -seconds_of(item)))


def seconds_of(item: pytest.Item) -> float:
    """Return the time limit that a test sets for itself, or 0."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None and mark.args else 0
