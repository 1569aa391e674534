"""`aengine serve` with a model that takes longer to load than anyone waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import aengine
import aengine.app
from aengine.cli import main
from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime


def start(config: EngineConfig, folder: Path, model: ModelConfig, begin_text: Callable[[], object]) -> Runtime:
    print("loading begins", flush=True)
    time.sleep(float(sys.argv[1]))
    return start_runtime(config, folder, model, begin_text)


if __name__ == "__main__":
    aengine.app._default_factory = lambda: lambda config: aengine.Engine(config=config, start=start)
    sys.exit(main(["serve", *sys.argv[2:]]))
