"""Without a GPU, the Triton kernels still run: tiny shapes, in the interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
WHERE = (
    "tests/kernels",
    "tests/sampling/test_fused.py",
    "tests/sampling/test_shared_tokens.py",
    "tests/attention/test_flash4.py",
)
TINY = " or ".join(
    (
        "test_norms.py",
        "test_shared_gate.py",
        "test_output_gate.py",
        "test_two_parts.py",
        "test_rope.py",
        "test_row_steps.py",
        "test_one_row.py",
        "test_route_rows.py",
        "test_single_rows.py",
        "test_gather_pages.py",
        "test_latent_inputs.py",
        "(test_latent_decode.py and (padded or left or refused or beyond or (narrow and (tiles or of-12))))",
        "(test_chunk_attention.py and (padded or left or refused or beyond))",
        "(test_chunk_attention.py and narrow and (more-heads or (40 and tiny-sinks)))",
        "(test_gumbel.py and (blocks or finite or floor or none))",
        "test_likeliest.py",
        "test_penalties.py",
        "(test_cutoff.py and ladders and ((sort and float32) or equals or broken))",
        "(int4 and test_product.py and (take_turns or refused or no_rows))",
        "(int4 and test_product.py and (written or (narrow and (zeros-32 or mxfp4))))",
        "(int4 and test_linear.py and narrow)",
        "(test_small_linear.py and ((every_cut and one) or in_its_place or normed))",
        "(test_decode_attention.py and (narrow-tiny-page-of-12 or dim-24))",
        "(test_decode_attention.py and (page-of-4 or capped or (hides and 16) or pairs or bytes or beyond or vanish))",
        "(test_triton_delta.py and float32 and not uneven and (alike or (mix and 5) or (cut and 63)))",
        "(test_triton_delta.py and ((one_by_one and narrow and half) or (saved and float32 and uneven)))",
        "test_flash4.py",
        "test_fused.py",
        "test_shared_tokens.py",
        "(test_triton_adapted.py and (undefined or alone or anew or float32_weights))",
        "(test_triton_adapted.py and activated and (few or mixed-16-True))",
        "(test_triton_adapted.py and float32 and (fused-1-16 or long-3-8) and mixed and (after or add_gated))",
        "(test_triton_adapted.py and fused-20-8 and mixed and (after or add_gated))",
        "(test_adapted_experts.py and (called or float32-7-8-False or many-gathered))",
        "(test_adapted_experts.py and narrow and (fp8-blocks-plain or int4-zeros-plain or (mxfp4 and gpt-oss)))",
        "(fp8 and test_pieces.py)",
        "(fp8 and test_inputs.py and (zeros or (float32 and not long)))",
        "(fp8 and test_few_rows.py and uneven and blocks and ((exact and narrow) or (scaled and plain)))",
        "(fp8 and test_many_rows.py and blocks and (group or (token and tall)) and not tiny-one)",
        "(fp8 and (test_few_tiles.py or (test_linear.py and (before or left or (blocks and group)))))",
        "(test_packed_experts.py and (order or gelu or (nowhere and narrow and (zeros or int4-64 or mxfp4))))",
        "test_plan.py",
        "(test_route.py and (not every_rule or narrow))",
        "(test_triton_experts.py and (not every_cut or (float32 and nowhere and not single)))",
        "(test_triton_experts.py and one-token and narrow and even)",
        "(test_prefix_attention.py and (float32-tiny or without or codes))",
        "(test_fp8_experts.py and (not every_cut or (nowhere and not one-token and float32 and blocks and not fine)))",
    )
)


ROOMS = ("attention", "experts", "linear", "lora")  # each by itself, side by side: together they take six minutes
PARTS = {room: [f"tests/kernels/{room}"] for room in ROOMS}
PARTS["rest"] = [*WHERE, *(f"--ignore=tests/kernels/{room}" for room in ROOMS)]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU")
@pytest.mark.parametrize("part", PARTS)
def test_the_kernels_are_right_in_the_interpreter(part: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", f"tiny and ({TINY})", *PARTS[part]]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=480, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
