"""Scheduler and runtime without the event loop: each step is scheduled, executed and committed."""

from __future__ import annotations

import itertools

import torch

from aengine.cache.kv import KVPool
from aengine.cache.radix import packed
from aengine.model.decoder import Decoder
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.runner import StepExecutor
from aengine.runtime.step.results import read_outcome
from aengine.runtime.step.rows import Rows
from aengine.sampling.sampler import Sampler
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import StepPlan
from tests.lessons.paper import pool_for


class Rig:
    """Runs sequences to their end."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_pages: int = 200,
        page_size: int = 16,
        max_rows: int = 8,
        max_step_tokens: int = 64,
        prefix_cache: bool = True,
    ) -> None:
        kv: KVPool = pool_for(decoder, num_pages, page_size)
        device = torch.device("cpu")
        rows = Rows(max_rows, 64, device, adapters=decoder.adapters is not None, near_shift=decoder.near_shift)
        self.executor = StepExecutor(decoder, kv, Sampler(rows.count, decoder.config.vocab_size, device), rows)
        self.scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_queue=1000,
            prefix_cache=prefix_cache,
        )
        self.tickets = itertools.count()
        self.plans: list[StepPlan] = []

    def add(self, prompt: list[int], new_tokens: int, stop_ids: tuple[int, ...] = ()) -> Sequence:
        """Enqueue a greedy request."""
        sequence = Sequence(
            prompt=packed(prompt),
            params=SamplingParams(temperature=0),
            seed=0,
            stop_ids=stop_ids,
            max_total=len(prompt) + new_tokens,
            rank=(0.0, next(self.tickets)),
        )
        self.scheduler.add(sequence)
        return sequence

    def run(self, depth: int = 0) -> None:
        """Run steps until every sequence has ended. depth: 1 plans a step before the last draws are known."""
        flying = []
        while True:
            plan = self.scheduler.schedule()
            if plan is not None:
                self.plans.append(plan)
                flying.append((plan, read_outcome(self.executor.execute(plan), lambda row: None, plan)))
            if len(flying) > depth or (plan is None and flying):
                self.scheduler.commit(*flying.pop(0))
            elif plan is None:
                break
            self.scheduler.check_integrity()
