"""Steps whose rows have adapters, launched as an engine launches them, while further adapters are put into places."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from aengine.config import EngineConfig
from aengine.errors import AdapterError
from aengine.model.config import ModelConfig
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.adapters import AdapterPlaces
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from aengine.step_plan import NewRow, PrefillChunk, StepPlan, StepResult
from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import NEW_TOKENS, expected_logits, write_adapter

PAGE, PAGES_PER_ROW = 16, 4
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": ["k_proj"]}
PROMPTS = [[5, 6, 7], list(range(20, 37)), list(range(90, 60, -1))]


class Driver:
    """Plans steps of rows that own their pages, and collects their draws."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.steps = 0
        self.tokens: dict[int, list[int]] = {}

    async def run(self, **plan: object) -> StepResult:
        empty: dict[str, object] = {"new_rows": [], "new_pages": [], "decode": [], "prefill": [], "page_copies": []}
        made = StepPlan(step=self.steps, **(empty | plan))  # type: ignore[arg-type]
        self.steps += 1
        result = await self.runtime.runner.launch(made).result()
        for row, token in zip(made.sampled_rows, result.token_ids, strict=True):
            self.tokens[row].append(token)
        return result

    def new(self, row: int, prompt: Sequence[int], adapter: int, params: SamplingParams, **more: object) -> NewRow:
        self.tokens[row] = list(prompt)
        values: dict[str, object] = {
            "pages": list(range(1 + row * PAGES_PER_ROW, 1 + (row + 1) * PAGES_PER_ROW)),
            "adapter": adapter,
            "length": 0,
        }
        return NewRow(
            row=row, params=params, seed=row, stop_ids=(), prompt_len=len(prompt), tokens=list(prompt),
            **(values | more),  # type: ignore[arg-type]
        )  # fmt: skip

    async def begin(self, adapters: dict[int, int], **params: object) -> StepResult:
        """A prompt in each row, which has an adapter."""
        sampling = SamplingParams(temperature=0, **params)  # type: ignore[arg-type]
        prompts = {row: PROMPTS[row % len(PROMPTS)] for row in adapters}
        return await self.run(
            new_rows=[self.new(row, prompts[row], place, sampling) for row, place in adapters.items()],
            prefill=[
                PrefillChunk(
                    row=row,
                    start=0,
                    token_ids=prompt,
                    samples=True,
                    score_ids=prompt[1:] if sampling.prompt_logprobs is not None else (),
                )
                for row, prompt in prompts.items()
            ],
        )

    async def decode(self, rows: Sequence[int]) -> None:
        while len(self.tokens[rows[0]]) < len(PROMPTS[rows[0] % len(PROMPTS)]) + NEW_TOKENS:
            await self.run(decode=list(rows))

    def assert_drew(self, row: int, model: PreTrainedModel) -> None:
        tokens = self.tokens[row]
        best = expected_logits(model, tokens).topk(2, dim=-1)
        clear = best.values[:, 0] - best.values[:, 1] > 1e-3
        assert torch.equal(torch.tensor(tokens[-NEW_TOKENS:])[clear], best.indices[clear, 0])


@pytest.fixture(
    scope="module",
    params=[
        "qwen3-moe",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen3", "qwen3-bias-untied", "gpt-oss")),
    ],
)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[PreTrainedModel]]:
    """A folder with a base and three adapters, the third of the output matrix; the base and the merged models."""
    folder = tmp_path_factory.mktemp(request.param)
    # The driver plans no windows.
    sizes = {"layer_types": ["full_attention"] * 2} if request.param == "gpt-oss" else {}
    base = write_checkpoint(request.param, folder / "base", **sizes)
    head = {"target_modules": ["lm_head", "o_proj"]}
    layers = EXPERTS if request.param in ("qwen3-moe", "gpt-oss") else {}
    return folder, [
        base,
        *(
            write_adapter(base, folder / str(place), place, **settings)
            for place, settings in ((1, layers), (2, {"r": 20} | layers), (3, head))
        ),
    ]


@pytest.fixture(
    params=[
        ("cpu", 1),
        pytest.param(("cpu", 2), marks=pytest.mark.slow),
        pytest.param(("cuda", 1), marks=pytest.mark.gpu),
    ]
)
def runtime(request: pytest.FixtureRequest, written: tuple[Path, list[PreTrainedModel]]) -> Iterator[Runtime]:
    """With room for all three adapters, which are not there yet, and for one more."""
    folder, _ = written
    device, ranks = request.param
    config = EngineConfig(
        device=device,
        dtype="float32",
        lora={str(place): str(folder / str(place)) for place in (1, 2, 3)},
        max_loras=4,
        max_num_seqs=8,
        num_pages=8 * PAGES_PER_ROW + 1,
        tensor_parallel_size=ranks,
        progress=False,
        torch_threads=1,
    )
    runtime = start_runtime(config, folder / "base", ModelConfig.from_folder(folder / "base"))
    yield runtime
    if runtime.adapters is not None:
        runtime.adapters.close()
    runtime.runner.close()


def places(runtime: Runtime) -> AdapterPlaces:
    assert runtime.adapters is not None
    return runtime.adapters


@pytest.mark.slow
@pytest.mark.parametrize("scored", [False, True])  # scored prompts need logits of all tokens
def test_a_step_of_all_adapters_and_none(
    scored: bool, runtime: Runtime, written: tuple[Path, list[PreTrainedModel]]
) -> None:
    folder, models = written

    async def run() -> None:
        driver, adapters = Driver(runtime), places(runtime)
        assert adapters.count == 4
        for place in (1, 2, 3):
            await adapters.put(adapters.read(folder / str(place)), place)
        rows = dict(enumerate([0, 1, 2, 3, 3, 2, 1, 0]))
        result = await driver.begin(rows, **({"prompt_logprobs": 1} if scored else {}))
        assert len(result.scores) == scored * len(rows)
        for row, scores in enumerate(result.scores):
            prompt = PROMPTS[row % len(PROMPTS)]
            with torch.no_grad():
                logits = models[rows[row]](torch.tensor([prompt])).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor([one.logprob for one in scores]), expected, atol=1e-4, rtol=0)
        await driver.decode([3, 0, 6, 1, 4, 7, 2, 5])
        for row, place in rows.items():
            driver.assert_drew(row, models[place])

    asyncio.run(run())


def test_rows_change_their_adapters_and_forks_keep_them(
    runtime: Runtime, written: tuple[Path, list[PreTrainedModel]]
) -> None:
    folder, models = written

    async def run() -> None:
        driver, adapters = Driver(runtime), places(runtime)
        for place in (1, 2):
            await adapters.put(adapters.read(folder / str(place)), place)
        await driver.begin({0: 1, 1: 2})
        await driver.begin({0: 2, 1: 0})  # new owners
        params = SamplingParams(temperature=0)
        sibling = driver.new(3, PROMPTS[0], 0, params, pages=[], copy_of=2, length=3)  # the source's adapter counts
        await driver.run(
            new_rows=[driver.new(2, PROMPTS[0], 1, params), sibling],
            prefill=[PrefillChunk(row=2, start=0, token_ids=PROMPTS[0], samples=True, forks=[3])],
            new_pages=[(3, 0, 1 + 3 * PAGES_PER_ROW)],
            page_copies=[(1 + 2 * PAGES_PER_ROW, 1 + 3 * PAGES_PER_ROW)],
        )
        await driver.decode([0, 1, 2, 3])
        for row, place in ((0, 2), (1, 0), (2, 1), (3, 1)):
            driver.assert_drew(row, models[place])

    asyncio.run(run())


def test_a_place_is_filled_while_steps_with_other_places_run(
    runtime: Runtime, written: tuple[Path, list[PreTrainedModel]]
) -> None:
    folder, models = written

    async def run() -> None:
        driver, adapters = Driver(runtime), places(runtime)
        second, third = (adapters.read(folder / str(place)) for place in (2, 3))
        await adapters.put(adapters.read(folder / "1"), 1)
        await driver.begin({0: 1, 1: 0})

        async def fill() -> None:
            for _ in range(5):
                await adapters.put(second, 2)
                await adapters.put(third, 2)  # what the last one left is gone

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fill())
            tasks.create_task(driver.decode([0, 1]))
        await driver.begin({2: 2})
        await driver.decode([2])
        for row, place in ((0, 1), (1, 0), (2, 3)):
            driver.assert_drew(row, models[place])

    asyncio.run(run())


def test_an_adapter_that_finds_no_room_is_refused(
    runtime: Runtime, written: tuple[Path, list[PreTrainedModel]], tmp_path: Path
) -> None:
    _, models = written
    write_adapter(models[0], tmp_path, r=32)
    with pytest.raises(AdapterError, match=r"rank is (32|64), there is room for 20: raise max_lora_rank"):
        places(runtime).read(tmp_path)
