"""A proposer that knows the answer of each request, and drafts it with as many errors as a test wants."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.model.drafting.base import Taps
from aengine.runtime.speculation.base import Kept, ProposerChoice, ProposerParts
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import Start
from aengine.runtime.startup.start_torch import start_torch
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.step_plan import NewRow, StepPlan

Ids = Sequence[int]


class Book:
    """Answers that an engine without speculation has given."""

    def __init__(self) -> None:
        self._answers: defaultdict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)

    def write(self, prompt: Ids, answers: Iterable[Ids]) -> None:
        self._answers[tuple(prompt)] += map(tuple, answers)

    def next_token(self, prompt: Ids, output: Ids) -> int | None:
        """Return the token that follows an output in the first answer that begins with it. None: no answer does."""
        known = tuple(output)
        for answer in self._answers[tuple(prompt)]:
            if len(answer) > len(known) and answer[: len(known)] == known:
                return answer[len(known)]
        return None


@dataclass
class Drafts:
    """What a test wants to be drafted, and what became of it. Several ranks count together."""

    book: Book = field(default_factory=Book)
    right: float = 1.0  # the share of right drafts
    most: int = 4  # drafts of a row in a step
    seed: int = 0  # chooses the places of the errors
    wrong: Ids = range(300, 4000)  # ids of wrong drafts
    verified: int = 0
    accepted: int = 0

    def start(self) -> Start:
        """Return a function that starts a runtime on the CPU, which drafts in this way."""
        choice = ProposerChoice("replay", "a test asks for it", self.most, partial(ReplayProposer, self))

        def start(config: EngineConfig, folder: Path, model: ModelConfig, wait: Callable[[], object]) -> Runtime:
            return start_torch(config, folder, model, wait, choice)

        return start

    def draft(self, prompt: Ids, output: Ids, count: int) -> list[int]:
        """Return drafts after an output. Their errors depend on nothing but the tokens before, and the seed.

        After an error the answer continues, so a draft may equal its draw after the first one that is refused.
        """
        drafts: list[int] = []
        for place in range(count):
            token_id = self.book.next_token(prompt, [*output, *drafts[:place]])
            drafts.append(-1 if token_id is None else token_id)
        for place, token_id in enumerate(drafts):
            chance = random.Random(f"{self.seed} {prompt[-3:]} {output} {place}")
            if token_id < 0 or chance.random() >= self.right:
                drafts[place] = chance.choice(self.wrong)
        return drafts


class ReplayProposer:
    """`Proposer` that drafts as a test wants. It also checks what the runtime tells it."""

    name = "replay"
    taps: Taps | None = None

    def __init__(self, drafts: Drafts, parts: ProposerParts) -> None:
        self._drafts = drafts
        self._prompts: list[list[int]] = [[] for _ in range(parts.rows.count)]
        self._outputs: list[list[int]] = [[] for _ in range(parts.rows.count)]

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            self._prompts[new.row] = list(new.tokens[: new.prompt_len])
            self._outputs[new.row] = list(new.tokens[new.prompt_len :])

    def propose(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs | None) -> None:
        if kept is None:
            return
        lengths, most = rows.length.tolist(), plan.proposals
        for row, tokens, count in zip(kept.rows.tolist(), kept.tokens.tolist(), kept.counts.tolist(), strict=True):
            if not count:  # the padding row of a captured step
                continue
            prompt, output = self._prompts[row], self._outputs[row]
            output += tokens[:count]
            if lengths[row] + 1 != len(prompt) + len(output):
                raise RuntimeError(f"row {row} has {lengths[row]} keys, {len(prompt)} + {len(output)} tokens")
            if int(rows.last_token[row]) != output[-1]:
                raise RuntimeError(f"the last token of row {row} is {int(rows.last_token[row])}, not {output[-1]}")
            if most:
                rows.next_tokens[1 : 1 + most, row] = torch.tensor(self._drafts.draft(prompt, output, most))
        verified = sum(plan.drafts)
        self._drafts.verified += verified
        self._drafts.accepted += sum(kept.counts.tolist()) - len(kept.counts)
