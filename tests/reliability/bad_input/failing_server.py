"""`aengine` as it is, but for one thing: a step that reads the token of the environment's choice fails."""

from __future__ import annotations

import os
import sys

from aengine.cli.main import main
from aengine.runtime.runner import CpuRunner, Forwarded
from aengine.step_plan import StepPlan


class FailingRunner(CpuRunner):
    def _forward(self, plan: StepPlan) -> Forwarded:
        deadly = int(os.environ["TESTS_DEADLY_TOKEN"])
        if any(deadly in chunk.token_ids for chunk in plan.prefill):
            raise RuntimeError("an injected step error")
        return super()._forward(plan)


if __name__ == "__main__":
    import aengine.runtime.startup.start_torch

    aengine.runtime.startup.start_torch.CpuRunner = FailingRunner  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
