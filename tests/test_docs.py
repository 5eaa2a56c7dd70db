"""The pages under docs/ print what the commands in them print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from server.kvpool.layout import CACHE_DTYPES, AttentionKind, CacheLayout, LayerLayout
from server.kvpool.sizing import most_tokens_held, sequence_bytes
from server.plan import main

ROOT = Path(__file__).parents[1]
SMOLLM2 = (LayerLayout(AttentionKind.GQA, 3, 64, 64),) * 30
CHOICE = re.compile(r"(?:(\w+), )?(?:(\w+)|(H2O|sinks and window) of ([\d,]+))")
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


def choices() -> list[list[str]]:
    """The rows of the table of what each choice costs, cell by cell."""
    page = (ROOT / "docs" / "kv-cache.md").read_text(encoding="utf-8")
    table = page.partition("\n| cache | B a token | a sequence |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_there_are_choices() -> None:
    assert {"float32", "int8", "fp8", "H2O of 512", "sinks and window of 512"} <= {row[0] for row in choices()}


@pytest.mark.parametrize("row", choices(), ids=lambda row: row[0])
def test_the_memory_of_each_choice_is_what_the_formula_says(row: list[str]) -> None:
    match = CHOICE.fullmatch(row[0])
    assert match is not None, row[0]
    dtype = CACHE_DTYPES[match[1] or match[2] or "float32"]
    budget = None if match[4] is None else int(match[4].replace(",", ""))
    layout = CacheLayout(SMOLLM2, dtype, 16, scored=match[3] == "H2O")
    held = sequence_bytes(layout, most_tokens_held(2048, budget, 16))
    assert row[1:3] == [f"{layout.bytes_per_token:,}", f"{held / 2**20:.1f} MiB"]
