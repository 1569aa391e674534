"""Prepares torch and CUDA before torch is imported, in calls that release the GIL."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# torch itself links them in this order and with these scopes.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL))


def link_torch() -> None:
    """Link torch's libraries, with the GIL released.

    Linking takes a third of the time of torch's import. `dlopen`, called as a foreign function, releases the GIL. An
    import and `ctypes.CDLL` hold it. Each library has a thread of its own: one thread for both would need the GIL
    between the calls, and parsing a tokenizer holds it for long. The libraries contain no Python code. Does nothing if
    they are missing: the import raises the error later.
    """
    spec = importlib.util.find_spec("torch")  # looked up, not imported
    try:
        dlopen = ctypes.CDLL(None).dlopen
    except (AttributeError, TypeError, OSError):
        return
    dlopen.restype = ctypes.c_void_p
    folders = () if spec is None else spec.submodule_search_locations or ()
    with ThreadPoolExecutor(len(_LIBRARIES), "aengine-link") as threads:
        for path, scope in ((Path(folder, "lib", name), scope) for folder in folders for name, scope in _LIBRARIES):
            if path.exists():
                threads.submit(dlopen, os.fsencode(path), os.RTLD_NOW | scope)


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
