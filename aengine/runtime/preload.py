"""Links torch's shared libraries before torch is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

# torch itself links them in this order and with these scopes.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL))


def link_torch() -> None:
    """Link torch's libraries in the calling thread, with the GIL released.

    Linking takes a third of the time of torch's import. `dlopen`, called as a foreign function, releases the GIL. An
    import and `ctypes.CDLL` hold it. The libraries contain no Python code. Does nothing if they are missing: the import
    raises the error later.
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
