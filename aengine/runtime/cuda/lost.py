"""Tells whether a device can continue after an error. A fault that breaks its context is final."""

from __future__ import annotations

import torch

from aengine.errors import DeviceLostError

# CUDA's error codes after which every call returns the same error: uncorrectable memory and link faults, illegal
# addresses and instructions, launches that timed out, device asserts, unknown errors.
_STAYING = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999})


WAITED_IN_VAIN = "the device is lost: a GPU waited in vain for another one"


def is_lost(error: BaseException) -> bool:
    """Return whether every further step would fail as well."""
    if isinstance(error, torch.AcceleratorError):
        code = getattr(error, "error_code", None)
        return code is None or code in _STAYING
    return isinstance(error, DeviceLostError)
