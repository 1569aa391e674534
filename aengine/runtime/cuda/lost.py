"""Decides whether a device can be used after an error. It cannot if the fault has broken its CUDA context."""

from __future__ import annotations

import torch

from aengine.errors import DeviceLostError

# CUDA's error codes after which every further call fails: uncorrectable memory and link faults, illegal
# addresses and instructions, launches that timed out, device asserts, unknown errors.
_BROKEN_CONTEXT = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999})


PEER_TIMEOUT = "the device is lost: a GPU waited in vain for another one"


def is_lost(error: BaseException) -> bool:
    """Return whether every further step would fail as well."""
    if isinstance(error, torch.AcceleratorError):
        code = getattr(error, "error_code", None)
        return code is None or code in _BROKEN_CONTEXT
    return isinstance(error, DeviceLostError)
