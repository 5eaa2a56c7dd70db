"""Every curl in the README and in docs/api.md is answered."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import Served

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.embedded


def commands() -> list[tuple[str, str]]:
    """(page, command)"""
    found = []
    for page in ("README.md", "docs/api.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        found += [(page, block) for block in blocks if block.startswith("curl")]
    return found


def test_there_are_some() -> None:
    assert [page for page, _ in commands()].count("docs/api.md") >= 6
    assert "README.md" in [page for page, _ in commands()]


@pytest.mark.parametrize(("page", "command"), commands())
def test_it_is_answered(page: str, command: str, served: Served) -> None:
    with_key = f'curl() {{ command curl -sS --fail-with-body -H "Authorization: Bearer {served.key}" "$@"; }}\n'
    script = with_key + command.replace("http://127.0.0.1:8000", served.url)
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("{")
