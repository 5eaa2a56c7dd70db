"""The simulation prints the same numbers every time, and the page that shows them shows these."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scheduling.md"


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest.simulate", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_page_shows_what_its_commands_print() -> None:
    examples = re.findall(r"```console\n\$ python -m loadtest\.simulate ?(.*)\n((?s:.*?))```", PAGE.read_text())
    assert examples
    for arguments, shown in examples:
        printed = simulate(*arguments.split())
        assert printed.returncode == 0, printed.stderr
        assert shown == printed.stdout, f"{PAGE.name} is out of date; it should show\n{printed.stdout}"


def test_another_seed_is_another_load() -> None:
    small = ("--requests", "20", "--blocks", "64", "--budgets", "64")
    assert simulate(*small, "--seed", "1").stdout != simulate(*small, "--seed", "2").stdout


def test_a_pool_too_small_for_the_load_is_refused() -> None:
    refused = simulate("--blocks", "63")
    assert refused.returncode == 2
    assert "--blocks must be at least 64" in refused.stderr
