"""On the meta device a quantised checkpoint becomes the same linears, of tensors without contents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.collective.threads import Meeting, ThreadCollective
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import leave_empty

from .checkpoints import write_quantized
from .schemes import slow_but_some


@pytest.mark.parametrize("scheme", slow_but_some(quick=("fp8-blocks", "gptq-desc-act")))
def test_nothing_asks_for_a_value(scheme: str, tmp_path: Path) -> None:
    write_quantized(scheme, "mixtral", tmp_path / "quantised", tmp_path / "twin")
    config = ModelConfig.from_folder(tmp_path / "quantised")
    leave_empty(Decoder(config, TorchKernels(), TorchAttention(), torch.bfloat16).groups)


@pytest.mark.parametrize("scheme", slow_but_some(quick=("fp8-blocks", "gptq-desc-act")))
def test_nor_does_that_of_a_rank(scheme: str, tmp_path: Path) -> None:
    write_quantized(scheme, "qwen3-bias-untied", tmp_path / "quantised", tmp_path / "twin", intermediate_size=256)
    config = ModelConfig.from_folder(tmp_path / "quantised").spread_over(2)
    for rank in range(2):
        last = ThreadCollective(rank, 2, Meeting(2))
        leave_empty(Decoder(config, TorchKernels(), TorchAttention(), torch.bfloat16, ranks=last).groups)
