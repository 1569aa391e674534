"""Small random adapters that PEFT writes. Its merged weights are compared with our adapters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import adaptable_linears
from aengine.model.lora.room import LoraRoom
from aengine.model.lora.survey import survey
from aengine.runtime.adapters import AdapterPlaces, HostFiller
from tests.model.loading_one import load_model

from ..harness import Harness, Running

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NEW_TOKENS = 12
PROMPT_LENGTHS = (3, 17, 40)


def write_adapter(model: PreTrainedModel, folder: Path, seed: int = 0, **settings: object) -> PreTrainedModel:
    """Write a random adapter of the model into `folder`, and return the model with merged weights."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ALL} | settings
    save = {"save_embedding_layers": settings.pop("save_embedding_layers", False)}
    with quiet():
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(init_lora_weights=False, **settings))
        adapted.save_pretrained(folder, **save)
        return merge(model, folder)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*save_embedding_layers.*", category=UserWarning)
        # If only some layers are dense, PEFT renames its targets for one kind of layer only.
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match.*", category=RuntimeWarning)
        yield


def merge(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return the model with the adapter in `folder` merged by PEFT."""
    adapted = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    if model.config.tie_word_embeddings and "lm_head" in adapted.peft_config["default"].target_modules:
        return adapted  # merging it would also change the embedding
    return adapted.merge_and_unload().eval()


def load(folder: Path, adapters: Sequence[Path], dtype: torch.dtype = torch.float32, **room: object) -> Decoder:
    """Load the checkpoint in `folder`, with the adapters in its places from 1 on. room: None means that of `survey`."""
    config = ModelConfig.from_folder(folder)
    config = config.with_lora(room_for(config, adapters, **room))
    decoder = load_model(
        folder, config, device=torch.device("cpu"), dtype=dtype, kernels=TorchKernels(), attention=TorchAttention()
    )
    put([decoder], adapters, dtype)
    return decoder


def room_for(config: ModelConfig, adapters: Sequence[Path], **room: object) -> LoraRoom:
    options = {"places": len(adapters), "max_rank": None, "loading": False} | room
    names = {path.name: path for path in adapters}
    return survey(names, adaptable_linears(config), **options)  # type: ignore[arg-type]


def put(decoders: Sequence[Decoder], adapters: Sequence[Path], dtype: torch.dtype = torch.float32) -> None:
    memories = [decoder.adapters for decoder in decoders if decoder.adapters is not None]
    places = AdapterPlaces(memories, [HostFiller() for _ in memories], dtype)
    for place, path in enumerate(adapters, 1):
        places.fill(places.read(path), place)
    places.close()


def mixed(count: int, vocab: int) -> list[Running]:
    """Return prompts without an adapter and with each, in turn."""
    generator = torch.Generator().manual_seed(7)
    return [
        Running(torch.randint(0, vocab, (length,), generator=generator).tolist(), adapter=place)
        for length in PROMPT_LENGTHS
        for place in range(count + 1)
    ]


def assert_mixed(decoder: Decoder, models: Sequence[PreTrainedModel], **cut: int | None) -> None:
    """Assert that mixed batches give what each model computes alone. models: the base's first."""
    harness = Harness(decoder, page_size=16)
    sequences = harness.run(mixed(len(models) - 1, decoder.config.vocab_size), NEW_TOKENS, **cut)  # type: ignore[arg-type]
    for place, model in enumerate(models):
        assert_computes(model, [one for one in sequences if one.adapter == place])


def assert_computes(model: PreTrainedModel, sequences: Sequence[Running]) -> None:
    """Assert that the sequences are greedy continuations by the model."""
    for sequence in sequences:
        expected, got = expected_logits(model, sequence.tokens), torch.stack(sequence.logits)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        best = expected.topk(2, dim=-1)
        clear = best.values[:, 0] - best.values[:, 1] > 1e-3
        drawn = torch.tensor(sequence.tokens[-NEW_TOKENS:])
        assert torch.equal(drawn[clear], best.indices[clear, 0])


def expected_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Return the logits of the last tokens, [NEW_TOKENS, vocab]."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens[:-1]])).logits[0, -NEW_TOKENS:]
    return logits
