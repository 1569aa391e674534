"""Models spread over ranks. Each rank is a thread with a `Harness`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.collective.threads import Meeting, ThreadCollective
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.drafting.dflash_config import read_dflash
from aengine.model.drafting.eagle3_config import read_eagle3
from aengine.model.loading.heads import load_heads
from aengine.model.loading.load import Placement, load_shards
from aengine.model.lora.room import LoraRoom

from .harness import Harness, Running

T = TypeVar("T")


class Counted(ThreadCollective):
    """A collective that counts its sums."""

    sums = 0

    def sum(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        self.sums += 1
        return super().sum(part, residual)


class InPieces(Counted):
    """A collective that computes sums of many tokens in pieces."""

    def pieces(self, tokens: int) -> Sequence[slice]:
        third = tokens // 3
        return [slice(0, third), slice(third, 2 * third), slice(2 * third, tokens)] if third else super().pieces(tokens)


class Ranks:
    """The shards of one model."""

    def __init__(
        self,
        folder: Path,
        count: int,
        dtype: torch.dtype = torch.float32,
        collective: type[Counted] = Counted,
        lora: LoraRoom | None = None,
        drafting: bool = False,
        eagle3: Path | None = None,
        dflash: Path | None = None,
        sees: bool = False,
        **options: Any,
    ) -> None:
        """Args:
        lora: the room for adapters.
        drafting: whether there is a draft head, which is stored with the model.
        eagle3, dflash: the folder of a draft head.
        sees: whether the tower for images is loaded, too.
        options: those of `load_shards`.
        """
        cpu, attention = torch.device("cpu"), TorchAttention()
        self._meeting = Meeting(count)
        self.collectives = [collective(rank, count, self._meeting) for rank in range(count)]
        placements = [
            Placement(cpu, TorchKernels(), attention, None if count == 1 else one) for one in self.collectives
        ]
        config = ModelConfig.from_folder(folder).with_lora(lora).spread_over(count)
        config = config.with_drafting() if drafting else config
        config = config.with_images() if sees else config
        config = config if eagle3 is None else config.with_head(read_eagle3(eagle3, config))
        config = config if dflash is None else config.with_head(read_dflash(dflash, config))
        self.decoders = load_shards(folder, config, placements, dtype=dtype, **options)
        if (head := eagle3 or dflash) is not None:
            load_heads(head, self.decoders, placements)

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> list[list[Running]]:
        """Call `Harness.generate` on each rank and return all results."""
        return self.each(lambda decoder: Harness(decoder, page_size=16).generate(prompts, new_tokens, **options))

    def each(self, call: Callable[[Decoder], T]) -> list[T]:
        """Call a function with every rank's decoder, all at the same time."""

        def guarded(decoder: Decoder) -> T:
            try:
                return call(decoder)
            except BaseException:
                self._meeting.give_up()
                raise

        with ThreadPoolExecutor(len(self.decoders)) as threads:
            futures = [threads.submit(guarded, decoder) for decoder in self.decoders]
        errors = [error for error in map(Future.exception, futures) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
