"""The Triton kernels run on a GPU, or without one in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||out - reference|| / ||reference||, or inf if `out` has a NaN."""
    difference = (out.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)
    return float("inf") if bool(difference.isnan()) else float(difference)


@pytest.fixture(params=["float32", "narrow"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """float32, and a 16-bit dtype: the interpreter cannot compute in bfloat16."""
    if request.param == "float32":
        return torch.float32
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative error of a kernel."""
    return 3e-6 if dtype == torch.float32 else 5e-3
