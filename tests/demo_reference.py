"""The demo model in transformers."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel


def load_demo(folder: Path) -> PreTrainedModel:
    """Load the demo model, or a variant of it, in float32. It may take images, or be a language model alone."""
    sees = hasattr(transformers.AutoConfig.from_pretrained(folder), "vision_config")
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float32)
    return model.eval()
