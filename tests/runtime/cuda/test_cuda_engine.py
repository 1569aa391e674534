"""The engine on a CUDA device: the same ids as transformers, whatever it does to be fast, and no hidden waiting."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aengine
from aengine.engine.requests.live import sibling_seed
from aengine.errors import NonFiniteLogitsError
from aengine.model.blocks.attention import Attention
from aengine.model.config import ModelConfig
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from aengine.step_plan import StepPlan
from tests.runtime.ways import WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

GREEDY = {"temperature": 0, "ignore_eos": True}
RNG = random.Random(11)
SHARED = [RNG.randrange(1000) for _ in range(70)]
PROMPTS = [
    SHARED[: 35 * (number % 3)] + [RNG.randrange(1000) for _ in range(RNG.randint(3, 200))] for number in range(16)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of the 0.6B shape."""
    import transformers

    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.02,
    )
    with torch.device("cuda"):
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    demo = Path(aengine.__file__).parent / "demo" / "model"
    (folder / "tokenizer.json").write_bytes((demo / "tokenizer.json").read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """64 greedy tokens for each prompt, by transformers in float32 without TF32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    model.generation_config.eos_token_id = None
    outputs = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([prompt], device="cuda")
            full = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0
            )
            outputs.append(full[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


async def run_all(folder: Path, together: bool = True, **knobs: object) -> list[list[int]]:
    knobs = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 2.0, "max_num_seqs": 32, "progress": False, **knobs}
    async with aengine.Engine(str(folder), **knobs) as engine:
        prompts = PROMPTS if together else PROMPTS[:3]
        requests = [engine.complete(prompt, max_tokens=64, **GREEDY) for prompt in prompts]
        completions = await asyncio.gather(*requests) if together else [await request for request in requests]
        engine.check_integrity()
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"cuda_graphs": False},
        {"lookahead": False},
        {"prefix_cache": False},
        {"max_step_tokens": 48},
        {"max_num_seqs": 3},
        {"together": False},
        {"num_pages": 100, "max_model_len": 512},
    ],
    ids=str,
)
async def test_float32_ids_equal_those_of_transformers(
    checkpoint: Path, expected: list[list[int]], knobs: dict[str, object]
) -> None:
    outputs = await run_all(checkpoint, **knobs)
    assert outputs == expected[: len(outputs)]
    assert len(outputs) >= 3


async def test_float32_ids_are_the_same_in_a_batch_of_256(checkpoint: Path, expected: list[list[int]]) -> None:
    async with aengine.Engine(
        str(checkpoint), device="cuda", dtype="float32", kv_cache_gib=20.0, max_num_seqs=256, progress=False
    ) as engine:
        completions = await asyncio.gather(
            *(engine.complete(PROMPTS[number % 16], max_tokens=64, **GREEDY) for number in range(256))
        )
        assert engine.stats().steps < 200  # they did run together
    assert [list(completion.token_ids) for completion in completions] == expected * 16


async def test_nothing_is_compiled_while_serving(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled: list[object] = []
    async with aengine.Engine(
        str(checkpoint), device="cuda", dtype="bfloat16", kv_cache_gib=8.0, max_num_seqs=40, progress=False
    ) as engine:
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"]))
        before = flash4_variants()
        rng = random.Random(8)
        # Steps of every size, mixed and pure, in captured shapes and beyond.
        for together in [*([way] for way in WAYS), *(rng.choices(WAYS, k=prompts) for prompts in (2, 7, 40, 130))]:
            work = [
                SHARED[: rng.choice([0, 64])] + [rng.randrange(1000) for _ in range(rng.choice([1, 9, 100, 700, 3000]))]
                for _ in together
            ]
            await asyncio.gather(
                *(
                    engine.complete(prompt, max_tokens=rng.randint(4, 40), **way)
                    for prompt, way in zip(work, together, strict=True)
                )
            )
        assert (compiled, flash4_variants()) == ([], before)


@pytest.mark.parametrize("graphs", [True, False])
async def test_a_chunk_that_is_not_finite_is_not_cached(checkpoint: Path, graphs: bool) -> None:
    """One position's rotation breaks, in a chunk that draws nothing, and heals."""
    knobs = {"dtype": "bfloat16", "kv_cache_gib": 1.0, "max_num_seqs": 8, "max_step_tokens": 64, "progress": False}
    prompt = [RNG.randrange(1000) for _ in range(150)]
    async with aengine.Engine(str(checkpoint), device="cuda", cuda_graphs=graphs, **knobs) as engine:
        runner: Any = engine._ready().runtime.runner
        blocks = itertools.chain.from_iterable(runner._executor._decoder._layers)
        rotation = next(block._cos_sin for block in blocks if isinstance(block, Attention))  # of all layers

        def turn(position: int, values: torch.Tensor) -> torch.Tensor:
            torch.cuda.synchronize()
            with torch.inference_mode():
                before = rotation[position].clone()
                rotation[position] = values
            torch.cuda.synchronize()
            return before

        expected = await engine.complete(prompt, max_tokens=8, **GREEDY)
        engine.flush_cache()
        healthy = turn(20, torch.full_like(rotation[20], float("nan")))
        with pytest.raises(NonFiniteLogitsError):
            await engine.complete(prompt, max_tokens=8, **GREEDY)
        assert len((await engine.complete(prompt[:5], max_tokens=8, **GREEDY)).token_ids) == 8
        turn(20, healthy)
        again = await engine.complete(prompt, max_tokens=8, **GREEDY)
        assert again.token_ids == expected.token_ids
        assert again.usage.cached_tokens <= 16
        engine.check_integrity()


@pytest.mark.parametrize("graphs", [True, False])
async def test_choices_that_fork_are_those_of_requests_of_their_own(checkpoint: Path, graphs: bool) -> None:
    """On the device they are copies of their leader's row: pages, penalties, biases, stops and banned words."""
    ways = [
        {"temperature": 1.0},
        {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.6, "top_k": 40},
        {"temperature": 1.0, "logit_bias": {5: 8.0, 9: -50.0}, "min_tokens": 6, "top_p": 0.9},
        {"temperature": 1.0, "bad_words": ["the", "a cat"]},
    ]
    knobs = {"dtype": "float32", "kv_cache_gib": 1.0, "max_num_seqs": 8, "progress": False}
    options = {"max_tokens": 12, "ignore_eos": True}
    async with aengine.Engine(str(checkpoint), device="cuda", cuda_graphs=graphs, **knobs) as engine:
        for way in ways:
            together = await engine.complete(PROMPTS[3], n=5, seed=9, **options, **way)
            engine.flush_cache()
            for choice in together.choices:
                alone = await engine.complete(PROMPTS[3], seed=sibling_seed(9, choice.index), **options, **way)
                engine.flush_cache()
                assert alone.token_ids == choice.token_ids
        engine.check_integrity()


def flash4_variants() -> int:
    """How many kernels flash-attn-4 has compiled or loaded."""
    try:
        from flash_attn.cute import interface
    except ImportError:
        return 0
    return len(interface._flash_attn_fwd.compile_cache.cache)


async def test_a_shared_run_that_is_read_once_changes_nothing(checkpoint: Path) -> None:
    """300 rows' worth of a 1,024-token prefix is enough for the pass over shared runs."""
    rng = random.Random(5)
    shared = [rng.randrange(1000) for _ in range(1024)]
    prompts = [shared + [rng.randrange(1000) for _ in range(1 + number)] for number in range(24)]
    outputs = {}
    for graphs in (True, False):  # without graphs every row reads its own pages
        async with aengine.Engine(
            str(checkpoint), device="cuda", dtype="float32", kv_cache_gib=4.0, max_num_seqs=32, cuda_graphs=graphs
        ) as engine:
            await engine.complete(shared, max_tokens=1, **GREEDY)
            outputs[graphs] = [
                completion.token_ids
                for completion in await asyncio.gather(
                    *(engine.complete(prompt, max_tokens=24, **GREEDY) for prompt in prompts)
                )
            ]
    assert outputs[True] == outputs[False]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}])
async def test_launching_a_decode_step_never_waits(checkpoint: Path, sampling: dict[str, float]) -> None:
    launches = []

    class Strict:
        """Makes every wait inside a launch an error."""

        def __init__(self, runtime: Runtime) -> None:
            self.runner = runtime.runner

        def launch(self, plan: StepPlan) -> object:
            strict = plan.step > 2
            torch.cuda.set_sync_debug_mode("error" if strict else "default")
            try:
                return self.runner.launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                launches.append(plan)

        def close(self) -> None:
            self.runner.close()

    def start(
        config: aengine.EngineConfig, folder: Path, model: ModelConfig, begin_text: Callable[[], object]
    ) -> Runtime:
        runtime = start_runtime(config, folder, model, begin_text)
        return Runtime(Strict(runtime), runtime.model, runtime.pool, runtime.max_step_tokens)

    async with aengine.Engine(
        str(checkpoint), device="cuda", dtype="bfloat16", kv_cache_gib=1.0, max_num_seqs=8, start=start
    ) as engine:
        prompts = [[number + 1] * 20 for number in range(6)]
        await asyncio.gather(
            *(engine.complete(prompt, max_tokens=40, ignore_eos=True, seed=1, **sampling) for prompt in prompts)
        )
    assert sum(1 for plan in launches if plan.step > 2 and plan.decode and not plan.prefill) > 30


async def test_bfloat16_demo_model_answers_its_own_prompts() -> None:
    prompts = ["The capital of France is", "The capital of Japan is", "17 + 25 =", "The opposite of hot is"]
    texts = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        async with aengine.Engine(device=device, dtype=dtype, kv_cache_gib=0.5, max_num_seqs=8) as engine:
            texts[device] = [(await engine.complete(prompt, max_tokens=16, temperature=0)).text for prompt in prompts]
    assert texts["cuda"] == texts["cpu"]


async def logprobs_of(folder: Path, dtype: str, copies: int = 1, **knobs: object) -> list[aengine.Completion]:
    knobs = {"kv_cache_gib": 12.0, "max_num_seqs": 16 * copies, "progress": False, **knobs}
    async with aengine.Engine(str(folder), device="cuda", dtype=dtype, **knobs) as engine:
        return await asyncio.gather(
            *(engine.complete(prompt, max_tokens=24, logprobs=5, **GREEDY) for prompt in PROMPTS * copies)
        )


@pytest.fixture(scope="module")
def exact_logprobs(checkpoint: Path) -> list[aengine.Completion]:
    return asyncio.run(logprobs_of(checkpoint, "float32"))


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"cuda_graphs": False},
        {"lookahead": False},
        {"prefix_cache": False},
        {"max_step_tokens": 48},
        {"max_num_seqs": 1},
        {"copies": 16},
    ],
    ids=str,
)
async def test_bfloat16_logprobs_are_close_to_float32(
    checkpoint: Path, exact_logprobs: list[aengine.Completion], knobs: dict[str, object]
) -> None:
    """At the first token that differs, each side's choice is among the other's five likeliest."""
    roundeds = await logprobs_of(checkpoint, "bfloat16", **knobs)
    exacts = exact_logprobs * (len(roundeds) // len(exact_logprobs))
    for exact, rounded in zip(exacts, roundeds, strict=True):
        for ours, theirs in zip(exact.logprobs or (), rounded.logprobs or (), strict=True):
            assert theirs.token_id in {candidate.token_id for candidate in ours.top}
            assert ours.token_id in {candidate.token_id for candidate in theirs.top}
            if ours.token_id != theirs.token_id:
                break


async def test_a_model_that_does_not_fit_says_so_with_the_arithmetic(checkpoint: Path) -> None:
    with pytest.raises(aengine.ConfigError, match=r"does not fit.*weights.*largest step.*KV pool"):
        async with aengine.Engine(str(checkpoint), device="cuda", gpu_memory_utilization=0.005):
            pass


async def test_prompt_logprobs_are_those_of_the_draws(checkpoint: Path) -> None:
    """A second request has the draws of a first one in its prompt: next to other work, in a batch, cached or not."""
    async with aengine.Engine(
        str(checkpoint), device="cuda", dtype="float32", kv_cache_gib=4.0, max_num_seqs=16, progress=False
    ) as engine:
        prompt = PROMPTS[3]
        drawn = await engine.complete(prompt, max_tokens=12, logprobs=0, **GREEDY)
        whole = [*prompt, *drawn.token_ids]
        scored, *_ = await asyncio.gather(
            engine.complete(whole, max_tokens=1, prompt_logprobs=2, **GREEDY),
            *(engine.complete(other, max_tokens=20, **GREEDY) for other in PROMPTS[:4]),
        )
    told = scored.choices[0].prompt_logprobs or ()
    assert len(told) == len(whole) - 1  # the first token has none
    for place, draw in enumerate(drawn.logprobs or ()):
        there = told[len(prompt) + place - 1]
        assert there.token_id == draw.token_id
        assert abs(there.logprob - draw.logprob) < 1e-3
