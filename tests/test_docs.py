"""The pages under docs/ print what the commands in them print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from server.plan import main

ROOT = Path(__file__).parents[1]
PROMPT = "$ sluice plan "


def examples() -> list[tuple[str, str, str]]:
    """(page, arguments, printed text) of every `sluice plan` in a console block."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            command, _, printed = block.partition("\n")
            if command.startswith(PROMPT):
                found.append((page.name, command.removeprefix(PROMPT), printed))
    return found


def test_there_are_examples() -> None:
    assert [page for page, _, _ in examples()].count("kv-cache.md") >= 3


@pytest.mark.parametrize(("page", "arguments", "printed"), examples())
def test_printed_numbers_are_what_the_command_prints(
    page: str, arguments: str, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(arguments)) == 0
    assert printed == capsys.readouterr().out
