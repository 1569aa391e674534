"""torch's shared libraries, linked before torch is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

# In the order and with the scope that torch itself links them: CUDA's libraries for all, then its own.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL))


def link_torch() -> None:
    """Link torch's libraries from a thread beside others: an import would hold the interpreter meanwhile, for a third
    of what importing torch takes.

    As a foreign function `dlopen` leaves the interpreter alone, which neither an import nor `ctypes.CDLL` does. These
    libraries hold no Python. Says nothing where there are none: the import will.
    """
    spec = importlib.util.find_spec("torch")  # looked up, not imported
    try:
        dlopen = ctypes.CDLL(None).dlopen
    except (AttributeError, TypeError, OSError):
        return
    dlopen.restype = ctypes.c_void_p
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for name, scope in _LIBRARIES:
            path = Path(folder, "lib", name)
            if not path.exists() or not dlopen(os.fsencode(path), os.RTLD_NOW | scope):
                return
