"""What may be imported without paying for it: torch takes seconds, CUDA takes memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.one_in import one_in

HEAVY = ("torch", "transformers", "tokenizers", "llguidance", "safetensors", "triton")


def modules_after(statement: str) -> set[str]:
    """The modules in a fresh interpreter after `statement`."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def loaded_by(statement: str) -> set[str]:
    """The top-level modules in a fresh interpreter after `statement`."""
    return {name.partition(".")[0] for name in modules_after(statement)}


STATEMENTS = [
    "from aengine.app import app, create_app; create_app()",  # imports most of what the others do
    "import aengine",
    "import aengine.config",
    "import aengine.step_plan",
    "import aengine; aengine.Client",
    "from aengine import SamplingParams, ServerConfig, QueueFullError",
    "import aengine.http",
    "import aengine.scheduling.scheduler",
    "import aengine.app",
]


@pytest.mark.parametrize("statement", one_in(4, STATEMENTS))
def test_loads_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement).isdisjoint(HEAVY)


def test_the_names_of_the_package_are_there_and_the_check_sees_what_they_load() -> None:
    loaded = loaded_by("import aengine; [getattr(aengine, name) for name in aengine.__all__]")
    assert {"tokenizers", "llguidance"} <= loaded
    assert "torch" not in loaded  # an engine that is entered brings it, once the checkpoint's text is known to be sound


@pytest.mark.slow
def test_an_engine_on_a_cpu_needs_no_triton() -> None:
    """Builds of torch for the CPU come without it."""
    code = """if True:
        import asyncio, aengine
        async def main():
            async with aengine.Engine(device="cpu", kv_cache_gib=0.05, progress=False) as engine:
                await engine.complete("a", max_tokens=1)
        asyncio.run(main())"""
    loaded = loaded_by(code)
    assert "torch" in loaded
    assert "triton" not in loaded


def test_a_start_on_a_gpu_imports_only_kernels_that_every_model_needs() -> None:
    """Each kernel takes 1 ms, because Triton reads its source."""
    pytest.importorskip("triton")
    loaded = modules_after("import aengine.runtime.startup.start_cuda")
    assert "aengine.kernels.linear.one_row" in loaded
    some = ("collective.kernels", "delta.decode", "experts.many_rows", "experts.routing.plan", "linear.fp8.many_rows")
    some += ("linear.int4.row", "lora.shrink", "mamba.decode")
    assert loaded.isdisjoint(f"aengine.kernels.{name}" for name in some)
