"""From knobs and a checkpoint folder to a runtime, on the device that the knobs name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.device import resolve_device
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start_cpu import start_cpu

Start = Callable[[EngineConfig, Path, ModelConfig, Callable[[], object]], Runtime]


def start_runtime(
    config: EngineConfig, folder: Path, model: ModelConfig, wait_for_text: Callable[[], object] = lambda: None
) -> Runtime:
    """Load the model that lies in `folder` and make its state. Blocks for as long as that takes; call it off the loop.

    wait_for_text: called before weights are read; waits for what another thread loads meanwhile, and raises its errors.
    Raises `ConfigError` and `CheckpointError`.
    """
    device = resolve_device(config.device)
    if device.type == "cuda":
        from aengine.runtime.startup.start_cuda import start_cuda  # brings Triton, which a CPU has no use for

        return start_cuda(config, folder, model, device, wait_for_text)
    return start_cpu(config, folder, model, wait_for_text)
