"""Checkpoints that may replace the loaded one."""

from __future__ import annotations

import msgspec
import pytest

from aengine.errors import WeightsError
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import DEMO
from aengine.model.loading.load import matching_checkpoint


def test_what_the_device_has_of_a_model_is_no_difference() -> None:
    """Whether 4-bit matrices also exist as floats depends on memory, not on the checkpoint."""
    model = ModelConfig.from_folder(DEMO)
    matching_checkpoint(DEMO, model, msgspec.structs.replace(model, unpacked_copies=True))
    with pytest.raises(WeightsError, match=r"rms_norm_eps is 0\.5, that of the loaded model"):
        matching_checkpoint(DEMO, msgspec.structs.replace(model, rms_norm_eps=0.5), model)
