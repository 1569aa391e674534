"""Start-up compiles every variant of the kernels that drafts need, and processes beside it compile them ahead.

Nothing is computed, so that every draft is accepted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.kernels.ngram import triton_ngram
from aengine.model.config import ModelConfig
from aengine.runtime.cuda.decode_graphs import DecodeGraphs
from aengine.runtime.cuda.decode_shapes import DecodeShape
from aengine.runtime.speculation import choose
from aengine.runtime.startup import start_cuda
from aengine.runtime.startup.compiling import rehearsal
from aengine.runtime.step.written import WrittenVerdicts
from aengine.sampling.sampler import Kind
from aengine.scheduling.planning.drafting import Drafting
from aengine.step_plan import StepPlan
from tests.kernels.offline import MARKS
from tests.model.drafting.dflash_reference import DFlashSettings
from tests.model.drafting.eagle3_reference import HeadSettings
from tests.model.drafting.head_reference import write_head
from tests.runtime.cuda.no_gpu import (
    DEVICE,
    FP8,
    LATENTS,
    META,
    Variants,
    attention_of,
    checkpoint,
    cuda_config,
    flash4,
    replace_cuda,
)
from tests.runtime.cuda.serving import serve

pytestmark = [*MARKS, pytest.mark.slow]

MTP: dict[str, Any] = {"mtp_num_hidden_layers": 1}
DEEPSEEK: dict[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
DEEPSEEK |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1}
DEEPSEEK |= {"norm_topk_prob": True, "num_nextn_predict_layers": 1}
# The shape of Qwen3.5: three recurrent layers, then one with attention.
RECURRENT: dict[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"} | MTP
RECURRENT |= {"num_hidden_layers": 4, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
RECURRENT |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
RECURRENT |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
# Its sizes are none of the target's.
HEAD = HeadSettings(
    target_hidden=1024, target_vocab=9000, hidden=512, heads=4, kv_heads=4, head_dim=64, inner=1536, taps=(0, 1, 2),
    draft_vocab=3000, own_embedding=True,
)  # fmt: skip
BLOCK = DFlashSettings(
    target_hidden=1024, target_vocab=9000, hidden=512, heads=4, kv_heads=1, head_dim=64, inner=1536, taps=(1, 2),
    draft_vocab=9000, mask=3, block=8, own_embedding=True, own_head=True,
)  # fmt: skip


WITHOUT_FLASH = {"draft_tokens": 2}  # prompts would be read by a kernel that needs their lengths on the host


def propose_in_turns(drafting: Drafting, running: object, plan: StepPlan, room: int) -> None:
    """Let steps make any number of drafts."""
    plan.proposals = plan.step % (drafting.most + 1)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[DecodeShape]:
    """Return the shapes of the steps with drafts that replay graphs."""
    shapes: list[DecodeShape] = []
    real = DecodeGraphs.replay

    def replay(graphs: DecodeGraphs, plan: StepPlan, shape: DecodeShape, kind: Kind) -> WrittenVerdicts:
        shapes.append(shape)
        return real(graphs, plan, shape, kind)

    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    return shapes


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Variants:
    variants = replace_cuda(monkeypatch)
    monkeypatch.setattr(start_cuda, "choose_prefill", lambda *_: attention_of("flash-attn-4", variants.flash))
    monkeypatch.setattr(rehearsal, "flash4_is_installed", lambda: True)
    monkeypatch.setattr(choose, "_ngram_kernels", lambda device: triton_ngram)
    return variants


@pytest.mark.parametrize(
    ("speculation", "rows", "knobs", "more"),
    [
        pytest.param("mtp", 40, {}, MTP, id="mtp"),
        pytest.param("mtp", 1, {"kv_cache_gib": 0.25}, MTP | FP8, id="mtp-one-row-fp8"),
        pytest.param("mtp", 20, {"kv_cache_dtype": "fp8"}, LATENTS | DEEPSEEK, id="mtp-latents-experts"),
        pytest.param("mtp", 20, {}, RECURRENT, id="mtp-recurrent"),
        pytest.param("eagle3", 200, {"draft_tokens": 5}, {}, id="eagle3"),
        pytest.param("dflash", 70, {}, {}, id="dflash"),
        pytest.param("masks", 70, {}, {}, id="masks"),
        pytest.param("dflash", 3, {"cuda_graphs": False, "draft_tokens": 5}, FP8, id="dflash-no-graphs-fp8"),
        pytest.param("draft", 70, {"draft_tokens": 3}, {}, id="draft"),
        pytest.param("ngram", 70, {"draft_tokens": 7}, {}, id="ngram"),
        pytest.param("mtp", 5, {"cuda_graphs": False, "max_step_tokens": 64}, MTP, id="mtp-short-steps-no-graphs"),
        pytest.param("mtp", 5, WITHOUT_FLASH, MTP, id="mtp-without-flash"),
    ],
)
def test_nothing_is_compiled_while_drafts_are_verified(
    speculation: str,
    rows: int,
    knobs: dict[str, Any],
    more: dict[str, Any],
    tmp_path: Path,
    compiled: Variants,
    replayed: list[DecodeShape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if knobs is WITHOUT_FLASH:
        monkeypatch.setattr(start_cuda, "choose_prefill", lambda *_: attention_of("torch flash", compiled.flash))
        monkeypatch.setattr(rehearsal, "flash4_is_installed", lambda: False)
    if speculation == "eagle3":
        speculation = f"eagle3={write_head(HEAD, tmp_path / 'head', {})}"
    if speculation in ("dflash", "masks"):
        monkeypatch.setattr(Drafting, "begin", propose_in_turns)
    if speculation == "dflash":
        speculation = f"dflash={write_head(BLOCK, tmp_path / 'head', {})}"
    if speculation == "masks":
        speculation = f"eagle3={write_head(replace(HEAD, mask=5), tmp_path / 'head', {})}"
    if speculation == "draft":
        (tmp_path / "draft").mkdir()
        draft = checkpoint(tmp_path / "draft", 8, {"num_hidden_layers": 1, "intermediate_size": 768, "head_dim": 64})
        speculation = f"draft={draft}"
    config = cuda_config(rows, speculation=speculation, **knobs)
    folder = checkpoint(tmp_path, 8, more)
    runtime = start_cuda.start_cuda(config, folder, ModelConfig.from_folder(folder), DEVICE, lambda: None, lambda: None)
    assert runtime.speculation.most_drafts > 0
    assert not replayed  # a start launches all kernels of steps that replay nothing
    launched, attended = set(compiled.known), set(compiled.flash)
    compiled.new.clear()
    assert serve(runtime, rows) > 50
    assert bool(replayed) == config.cuda_graphs
    assert compiled.new == []
    assert compiled.flash == attended
    compiled.known.clear()
    compiled.flash.clear()
    rehearsal.run_through(compiled.jobs[0])
    assert sorted(launched - compiled.known) == []
    if knobs is WITHOUT_FLASH:
        assert not attended  # our own kernel reads the prompts
        return
    rehearsal.launch_flash(compiled.jobs[0], flash4(compiled.flash), META)
    assert attended <= compiled.flash
