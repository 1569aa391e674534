"""The device's context, opened through CUDA's driver alone."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from aengine.runtime import preload
from aengine.runtime.preload import open_contexts


class Driver:
    """libcuda, which knows two devices."""

    def __init__(self, devices: int = 2) -> None:
        self._devices = devices
        self._ready = False
        self.retained: list[int] = []

    def cuInit(self, flags: int) -> int:
        self._ready = self._devices > 0
        return 0 if self._ready else 100

    def cuDeviceGet(self, device: Any, index: int) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 70 + index
        return 0 if self._ready and index < self._devices else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.retained.append(device.value)
        return 0


@pytest.mark.parametrize(
    ("name", "retained"), [("auto", [70]), ("cuda", [70]), ("cuda:1", [71]), ("cuda:2", []), ("cpu", []), ("gpu", [])]
)
def test_the_context_of_the_named_device_is_opened(
    name: str, retained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(preload.ctypes, "CDLL", lambda library: driver)
    open_contexts(name)
    assert driver.retained == retained


def test_without_a_driver_or_a_device_no_context_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(devices=0)
    monkeypatch.setattr(preload.ctypes, "CDLL", lambda library: driver)
    open_contexts("auto")
    assert driver.retained == []

    def missing(library: str) -> None:
        raise OSError(library)

    monkeypatch.setattr(preload.ctypes, "CDLL", missing)
    open_contexts("cuda:0")


def test_several_devices_are_opened_from_the_named_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(devices=3)
    monkeypatch.setattr(preload.ctypes, "CDLL", lambda library: driver)
    open_contexts("cuda:1", 4)
    assert driver.retained == [71, 72]
