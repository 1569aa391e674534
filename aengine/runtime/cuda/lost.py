"""Whether a device that raised can go on: a fault that has put its context in error ends all that it could ever do."""

from __future__ import annotations

import torch

from aengine.errors import DeviceLostError

# CUDA's codes after which the context answers every call with the same error: uncorrectable memory and link faults,
# illegal addresses and instructions, launches that timed out, asserts, what nobody knows.
_STAYING = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999})


WAITED_IN_VAIN = "the device is lost: a GPU waited in vain for another one"


def is_lost(error: BaseException) -> bool:
    """Whether every further step would raise as well."""
    if isinstance(error, torch.AcceleratorError):
        code = getattr(error, "error_code", None)
        return code is None or code in _STAYING
    return isinstance(error, DeviceLostError)
