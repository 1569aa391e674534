"""Calls CUDA's driver before torch is imported."""

from __future__ import annotations

import ctypes
import re


def open_contexts(name: str, count: int = 1) -> None:
    """Initialise CUDA's driver and retain the contexts of `count` devices, beginning with the device `name`.

    These calls release the GIL. Otherwise torch makes them on first use and holds the GIL, for 0.4 s on an H200. If
    there is no driver or no such device, the function does nothing: `resolve_device` raises the error later.
    """
    named = re.fullmatch(r"(?:auto|cuda)(?::(\d+))?", name)
    if named is None:
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    if driver.cuInit(0) != 0:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    first = int(named[1] or 0)
    for index in range(first, first + count):
        if driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def driver_version() -> int:
    """Return the newest CUDA version the driver supports, such as 12080 for 12.8. 0 means there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value
