"""Every family is served from a random checkpoint in its publisher's format, and its calls are read."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers.utils import logging

from aengine.app import create_app
from aengine.config import CallFormatName, EngineConfig, ServerConfig
from aengine.model.loading.hub import DEMO
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.harmony import CONTROL
from tests.engine.checkpoints import with_config
from tests.http.serving import hosting, parse_events
from tests.model.checkpoints import save, write_checkpoint
from tests.model.families.test_internlm3 import PUBLISHED as INTERNLM3
from tests.model.families.test_other_names import GLM_SETTINGS, as_ling
from tests.model.quant.checkpoints import write_quantized
from tests.model.quant.encoders import Scheme
from tests.model.quant.schemes import SCHEMES
from tests.model.quant.test_mxfp4_checkpoints import write_gpt_oss
from tests.text.byte_grammars import call
from tests.text.template.test_layouts import TEMPLATE as HARMONY

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Casting complex values"),  # of the rotation in Llama 4's tower
]

VOCAB = 4160  # the demo model's tokenizer, and room for the markers of a format
BFLOAT16, MXFP4 = "bfloat16", "mxfp4"
LATENT = {"kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}
BESIDE = ("lm_head", "visual", "vision_tower", "multi_modal_projector")


def beside(scheme: str, *more: str) -> Scheme:
    """The scheme of a model with a vision part, or of a partly quantised one."""
    known, names = SCHEMES[scheme], [*BESIDE, *more]
    key = "ignore" if "config_groups" in known.config else "modules_to_not_convert"
    listed = [f"re:.*{name}.*" for name in names] if key == "ignore" else names
    return Scheme({**known.config, key: listed}, known.encode, tuple(names))


@dataclass(frozen=True)
class Family:
    case: str
    form: str | Scheme = BFLOAT16
    calls: CallFormatName | None = None  # None: harmony, or none at all
    sizes: dict[str, object] = field(default_factory=dict)
    rename: Callable[[Path], None] | None = None  # gives the files the names of a family without a class of its own

    @property
    def harmony(self) -> bool:
        return self.form == MXFP4


FAMILIES: dict[str, Family] = {
    "Qwen3.5": Family("qwen3-5-wrapped", calls="qwen3_coder"),
    "Qwen3.5 FP8": Family("qwen3-5-wrapped", beside("fp8-blocks", "in_proj_a", "in_proj_b"), "qwen3_coder"),
    "Qwen3.5 MoE": Family("qwen3-5-moe-wrapped", calls="qwen3_coder"),
    "Qwen3.5 MoE FP8": Family("qwen3-5-moe-wrapped", beside("fp8-blocks", "in_proj_a", "in_proj_b"), "qwen3_coder"),
    "Qwen3-Next": Family("qwen3-next", calls="hermes"),
    "gpt-oss": Family("gpt-oss", MXFP4),
    "Gemma 2": Family("gemma2"),
    "Gemma 3": Family("gemma3-that-sees"),
    "Gemma 3n": Family("gemma3n", sizes={"vocab_size_per_layer_input": VOCAB}),
    "Gemma 4": Family("gemma4-that-sees", calls="gemma4", sizes={"vocab_size_per_layer_input": VOCAB}),
    "Gemma 4 MoE": Family("gemma4-moe", calls="gemma4"),
    "Ministral 3 FP8": Family("mistral3", beside("fp8-tensor-static"), "mistral"),
    "Mistral": Family("mistral", calls="mistral_list"),
    "GLM-4.5": Family("glm4-moe", calls="glm"),
    "GLM-4.7 FP8": Family("glm4-moe", "ct-fp8-channel", "glm"),
    "GLM-4.7-Flash": Family("glm4-flash", calls="glm", sizes=LATENT),
    "GLM-4.7-Flash W4A16": Family("glm4-flash", beside("ct-int4", "kv_b_proj"), "glm", LATENT),
    "DeepSeek-V2-Lite": Family("deepseek-v2-lite", calls="deepseek", sizes={**LATENT, "q_lora_rank": None}),
    "DeepSeek-V3": Family("deepseek-v3", "fp8-blocks", "deepseek", LATENT),
    "DeepSeek-V3.1": Family("deepseek-v3", "fp8-blocks", "deepseek_v31", LATENT),
    "DeepSeek-V3 AWQ": Family("deepseek-v3", "awq", "deepseek", LATENT),
    "OLMo 2": Family("olmo2"),
    "OLMo 3": Family("olmo3", calls="olmo"),
    "SmolLM3": Family("smollm3", calls="hermes"),
    "Phi-4-mini": Family("phi3", calls="phi4"),
    "Granite": Family("granite", calls="granite"),
    "Granite 4": Family("granite4-hybrid", calls="hermes"),
    "Granite 4 FP8": Family("granite4-hybrid", "ct-fp8-channel", calls="hermes"),
    "Granite 4 with experts": Family("granite4-hybrid-moe", calls="hermes"),
    "Nemotron-H": Family("nemotron-h", calls="nemotron"),
    "Nemotron 3": Family("nemotron3", calls="qwen3_coder"),
    "Nemotron 3 FP8": Family("nemotron3", "ct-fp8-channel", calls="qwen3_coder"),
    "Falcon-H1": Family("falcon-h1", calls="hermes"),
    "Falcon-H1 FP8": Family("falcon-h1", "ct-fp8-channel", calls="hermes"),
    "EXAONE 4": Family("exaone4", calls="hermes"),
    "dots.llm1": Family("dots1"),
    "MiniMax M2 FP8": Family("minimax-m2", "fp8-blocks", "minimax"),
    "Hy3": Family("hy3", calls="hy3"),
    "Qwen2.5-VL": Family("qwen2-5-vl", calls="hermes"),
    "Kimi K2.5": Family("kimi-k2-5", calls="kimi", sizes=LATENT),
    "LFM2": Family("lfm2", calls="lfm2"),
    "Qwen3-VL-MoE": Family("qwen3-vl-moe", calls="hermes"),
    "Llama 4": Family("llama4-wrapped", calls="pythonic"),
    "Llama 4 FP8": Family("llama4", beside("ct-fp8-channel", "router"), "pythonic"),
    "MiMo-V2-Flash FP8": Family("mimo-v2-flash", "fp8-blocks", "qwen3_coder", {"head_dim": 48, "v_head_dim": 32}),
    "GLM-4": Family("glm", calls="glm4"),
    "GLM-4-0414": Family("glm4", calls="glm4"),
    "GLM-4.1V": Family("glm4v"),
    "ERNIE 4.5": Family("ernie4-5"),
    "ERNIE 4.5 with experts": Family("ernie4-5-moe"),
    "Apertus": Family("apertus", calls="apertus"),
    "StarCoder2": Family("starcoder2"),
    "LFM2 with experts": Family("lfm2-moe", calls="lfm2"),
    "Phi-3.5-MoE": Family("phi-moe"),
    "Muse Glimmer": Family("muse-glimmer"),
    "Command R": Family("cohere", calls="command_r"),
    "Command R7B": Family("cohere2", calls="cohere"),
    "Seed-OSS": Family("seed-oss", calls="seed"),
    "Ling": Family("glm4-moe-qk-norm-groups", calls="hermes", sizes={**GLM_SETTINGS, "head_dim": 16}, rename=as_ling),
    "InternLM 3": Family(
        "llama-all-biases", calls="internlm", rename=partial(with_config, **INTERNLM3, qkv_bias=True, bias=True)
    ),
    "MiMo": Family("qwen2", calls="hermes", rename=partial(with_config, architectures=["MiMoForCausalLM"])),
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "sure": {"type": "boolean"}},
        "required": ["city", "sure"],
        "additionalProperties": False,
    },
}


def write(family: Family, folder: Path) -> None:
    logging.disable_progress_bar()
    sizes: dict[str, Any] = {**family.sizes, "vocab_size": VOCAB, "max_position_embeddings": 1024}
    if family.form == MXFP4:
        write_gpt_oss(folder, folder.parent / "twin", **sizes)
    elif family.form == BFLOAT16:
        save(write_checkpoint(family.case, folder, **sizes).to(torch.bfloat16), folder)
    else:
        write_quantized(family.form, family.case, folder, folder.parent / "twin", **sizes)
    if family.rename is not None:
        family.rename(folder)
    backend = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    markers, template = (), "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    if family.harmony:
        markers, template = CONTROL, HARMONY + "<|start|>assistant"
    elif family.calls is not None:
        markers = FORMATS[family.calls].syntax.markers
        known = "请使用 Json 格式表示调用的参数 " if family.calls == "glm4" else ""  # its calls have no marker
        example = known + "{% raw %}" + call("func_name1", '{"a": "x"}', family.calls) + "{% endraw %}"
        template = "{% if tools %}{{ tools | tojson }} Call them so: " + example + "\n{% endif %}" + template
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in markers])
    assert backend.get_vocab_size() <= VOCAB
    backend.save(str(folder / "tokenizer.json"))
    ends = ["<|return|>", "<|call|>"] if family.harmony else [settings["eos_token"]]
    generation = {"eos_token_id": [backend.token_to_id(end) for end in ends]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """The application of `aengine serve` in a real hypercorn."""
    config = EngineConfig(
        model=str(folder), device="cpu", max_num_seqs=8, kv_cache_gib=0.1, max_model_len=1024, progress=False
    )
    async with (
        hosting(create_app(config, ServerConfig())) as (port, _),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client,
    ):
        for _ in range(2400):
            if (await client.get("/ready")).status_code == 200:
                break
            await asyncio.sleep(0.05)
        yield client


async def events(client: httpx2.AsyncClient, **body: Any) -> list[Any]:
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    answer = await client.post(
        "/v1/chat/completions", json={"messages": messages, "stream": True, "max_tokens": 60, **body}
    )
    assert answer.status_code == 200, answer.text
    *found, done = parse_events(answer.text)
    assert done == "[DONE]"
    assert not [event for event in found if "error" in event], found
    return found


async def calls_are_read(client: httpx2.AsyncClient, tools: list[dict[str, Any]]) -> None:
    """A grammar makes the model write a call in its own format, and the call is read from the stream."""
    think = Tokenizer.from_file(str(DEMO / "tokenizer.json")).token_to_id("<think>")
    for seed in range(5):  # some draws repeat spaces for ever, if the grammar allows them
        drawn = {"temperature": 2.0, "seed": seed, "max_tokens": 400, "logit_bias": {str(think): -100}}
        found = await events(client, tools=tools, tool_choice="required", parallel_tool_calls=False, **drawn)
        choices = [event["choices"][0] for event in found]
        if choices[-1]["finish_reason"] != "length":
            break
    assert choices[-1]["finish_reason"] == "tool_calls"
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls") or ()]
    assert parts[0]["function"]["name"] == "get_weather"
    arguments = json.loads("".join(part["function"].get("arguments") or "" for part in parts))
    assert arguments["city"] in ("Oslo", "Rome")
    assert isinstance(arguments["sure"], bool)
    assert "".join(choice["delta"].get("content") or "" for choice in choices).strip() == ""


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_family_answers_and_its_calls_are_read_while_they_come(name: str, tmp_path: Path) -> None:
    folder, family = tmp_path / "model", FAMILIES[name]
    write(family, folder)
    async with served(folder) as client:
        tools = [{"type": "function", "function": WEATHER}]
        requested: list[dict[str, Any]] = [{}, {"temperature": 1.3, "seed": 1}]
        takes_tools = family.harmony or family.calls is not None
        if takes_tools:
            requested.append({"tools": tools})
        for body in requested:  # every text gives an answer
            choices = [event["choices"][0] for event in await events(client, **body)]
            assert choices[-1]["finish_reason"] in ("stop", "length", "tool_calls")
            deltas = [choice["delta"] for choice in choices]
            assert any(delta.get("content") or delta.get("reasoning_content") for delta in deltas)
        if takes_tools:
            await calls_are_read(client, tools)
        models = (await client.get("/v1/models")).json()["data"]
        assert [model["object"] for model in models] == ["model"]
    shutil.rmtree(tmp_path)
