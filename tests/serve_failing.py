"""The whole server, whose next step fails once a file exists: `python -m tests.serve_failing FILE serve ...`."""

from __future__ import annotations

import sys
from pathlib import Path

from server.cli import main
from server.model.runner import ModelRunner
from server.step import StepPlan, StepResult

if __name__ == "__main__":
    trigger = Path(sys.argv.pop(1))
    run = ModelRunner.run

    def run_until_then(runner: ModelRunner, plan: StepPlan) -> StepResult:
        if trigger.exists():
            raise RuntimeError("the device has gone")
        return run(runner, plan)

    ModelRunner.run = run_until_then
    sys.exit(main())
