"""Starts a runtime from the configuration and a checkpoint folder, on the configured device."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.device import resolve_device, resolve_dtype
from aengine.runtime.startup.libraries import load_libraries
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start_torch import start_torch

Start = Callable[[EngineConfig, Path, ModelConfig, Callable[[], object]], Runtime]


def start_runtime(
    config: EngineConfig, folder: Path, model: ModelConfig, begin_text: Callable[[], object] = lambda: None
) -> Runtime:
    """Load the model in `folder` and allocate its memory. Does blocking I/O; call it in a worker thread.

    begin_text: lets another thread read the vocabulary and make grammars, which holds the GIL. It is called before
        weights are read, because this thread mostly waits while they stream.

    Raises: ConfigError, CheckpointError.
    """
    device = resolve_device(config.device)
    if device.type != "cuda" or config.kernels == "torch":
        return start_torch(config, folder, model, begin_text, device=device)
    # With this setting Triton finds its backends by name. Otherwise it reads every installed package's entry points.
    os.environ.setdefault("TRITON_BACKENDS_IN_TREE", "1")
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    with ThreadPoolExecutor(1, "aengine-libraries") as beside:
        libraries = beside.submit(load_libraries, device, dtype, config.load_format == "auto")
        from aengine.runtime.startup.start_cuda import start_cuda  # imports Triton, which a CPU does not need

        return start_cuda(config, folder, model, device, libraries.result, begin_text)
