"""Reads a checkpoint's defaults for sampling, and the tokens that end an answer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from aengine.model.config import ModelConfig
from aengine.model.fields import Fields, read_json_object

FILE = "generation_config.json"

# The range of each parameter, as for requests.
_NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e4),
}


class GenerationDefaults(msgspec.Struct, frozen=True):
    """The defaults of one checkpoint."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float | int]  # the fields of `SamplingParams` that the checkpoint sets

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, eos_token_id: int | None = None) -> GenerationDefaults:
        """Read generation_config.json, if there is one. If it has no EOS ids, use those of config.json.

        eos_token_id: the tokenizer's. It also ends an answer, because files of fine-tuned models often disagree.

        Raises `CheckpointError` for values out of range. The error names the key.
        """
        path = folder / FILE
        named = () if eos_token_id is None or eos_token_id >= config.vocab_size else (eos_token_id,)
        if not path.exists():
            return cls(_joined(config.eos_token_ids, named), {})
        fields = Fields(read_json_object(path), str(path))
        eos = _joined(fields.ids("eos_token_id", config.vocab_size) or config.eos_token_ids, named)
        if not fields.flag("do_sample", default=True):
            # Greedy: the penalty still applies, but all other values of the file have no effect.
            sampling: dict[str, float | int] = {"temperature": 0.0}
            names = ["repetition_penalty"]
        else:
            sampling = {"top_k": fields.integer("top_k", -1, 2**31)} if fields.present("top_k") else {}
            names = list(_NUMBERS)
        for name in names:
            if fields.present(name):
                sampling[name] = fields.number(name, *_NUMBERS[name])
        return cls(eos, sampling)


def _joined(ids: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*ids, *more)))
