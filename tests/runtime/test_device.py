"""The device, dtype and threads of each knob, and the errors of wrong ones."""

from __future__ import annotations

import pytest
import torch

from aengine.errors import ConfigError
from aengine.runtime.device import (
    COMPILED_FOR,
    forward_threads,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    untried_kernels,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "mps", "cuda:99"])
def test_an_unusable_device_is_named_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device: '{name}'"):
        resolve_device(name)


def test_auto_takes_a_device_that_is_there() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_auto_dtype_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu() -> None:
    assert resolve_dtype("auto", CUDA, "bfloat16") is torch.bfloat16
    assert resolve_dtype("auto", CPU, "bfloat16") is torch.float32
    assert resolve_dtype("bfloat16", CPU, "float32") is torch.bfloat16
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype("auto", CUDA, "int8")


def test_short_steps_leave_the_loop_a_core_and_long_ones_take_all() -> None:
    threads = forward_threads(None, parameters=10_000_000)
    assert threads.for_step(1) <= threads.for_step(512)
    assert threads.for_step(49) == threads.short
    assert threads.for_step(50) == threads.long  # 50 tokens x 20 MFLOP
    configured = forward_threads(3, parameters=10_000_000)
    assert configured.for_step(1) == configured.for_step(10_000) == 3


def test_keys_and_values_are_kept_in_the_models_dtype_or_in_fp8() -> None:
    assert resolve_kv_dtype("auto", torch.float16, (7, 0)) == torch.float16
    assert resolve_kv_dtype("fp8", torch.float32) == torch.float8_e4m3fn  # on a CPU
    assert resolve_kv_dtype("fp8", torch.bfloat16, (8, 9)) == torch.float8_e4m3fn


@pytest.mark.parametrize("capability", [(8, 6), (8, 0), (7, 5)])
def test_a_gpu_without_fp8_is_refused_with_the_remedy(capability: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype: 'fp8' needs .* 8\.9 .* has {capability[0]}\..*use auto"):
        resolve_kv_dtype("fp8", torch.bfloat16, capability)


def test_the_log_says_on_which_gpus_kernels_never_ran() -> None:
    assert untried_kernels((9, 0)) == ""
    assert "compute capability 8.9 ours were only compiled" in untried_kernels((8, 9))
    assert "compute capability 12.1 ours were never compiled or run" in untried_kernels((12, 1))


def test_kernels_are_compiled_for_the_gpus_that_the_log_says_so_of() -> None:
    gpus = pytest.importorskip("tests.kernels.gpus")
    assert {gpu.launch.capability for gpu in gpus.GPUS.values()} == COMPILED_FOR
