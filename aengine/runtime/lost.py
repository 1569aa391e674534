"""Whether a device that raised can go on: a fault that has put its context in error ends all that it could ever do."""

from __future__ import annotations

import torch

from aengine.errors import DeviceLostError

# CUDA's codes of single calls, after which the context is as it was: invalid value, out of memory, invalid
# configuration, invalid device function, invalid handle, not found, not ready, out of resources for a launch, not
# supported. Every other one that an AcceleratorError carries stays for good.
_PASSING = frozenset({1, 2, 9, 98, 400, 500, 600, 701, 801})


def is_lost(error: BaseException) -> bool:
    """Whether every further step would raise as well."""
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) not in _PASSING
    return isinstance(error, DeviceLostError)
