"""The house keeps its floors: who may import whom, and who must not import torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "server").rglob("*.py"))

CONTRACTS = {"step", "generation", "reports", "config", "values", ""}  # "" is the package itself, for its version
MAY_IMPORT = {
    "": set(),
    "step": set(),
    "generation": {"step"},
    "reports": set(),
    "values": set(),
    "config": {"values"},
    "logs": set(),
    "flags": {"config"},
    "kvpool": CONTRACTS,
    "scheduler": CONTRACTS | {"kvpool"},
    "text": CONTRACTS,
    "model": CONTRACTS | {"kvpool", "text"},
    "metrics": CONTRACTS,
    "session": CONTRACTS | {"scheduler", "text"},
    "startup": CONTRACTS | {"scheduler", "kvpool", "model", "text", "metrics"},
    "delivery": CONTRACTS,
    "admission": CONTRACTS,
    "deadlines": set(),
    "sessions": CONTRACTS | {"scheduler", "text", "metrics", "delivery", "admission", "deadlines", "session"},
    "engine": CONTRACTS
    | {"scheduler", "model", "text", "metrics", "delivery", "admission", "session", "sessions", "startup"},
    "api": CONTRACTS | {"engine", "text", "metrics"},
    "checkpoint": CONTRACTS | {"kvpool", "model"},
    "plan": CONTRACTS | {"kvpool", "checkpoint"},
    "bench": CONTRACTS | {"flags", "model"},
    "cli": CONTRACTS | {"flags", "logs", "api", "plan", "bench"},
    "__main__": {"cli"},
}
"""For each room (a folder or a file of `server`) the others it may import, anywhere in its code."""

MAY_LOAD_TORCH = {
    "model",
    "startup",
    "kvpool.tensors",
    "kvpool.quantise",
    "kvpool.host",
    "kvpool.compaction",
    "bench.bare",
}
"""Rooms and modules that import torch or transformers when they are imported themselves."""


def module(path: Path) -> str:
    """The dotted name below `server`: 'kvpool.blocks', 'cli'; a package's own file has the package's name."""
    parts = path.relative_to(ROOT / "server").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def room(name: str) -> str:
    return name.split(".")[0]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            # `from server import plan` imports a module, `from server import __version__` a name of the package
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: none inside functions or under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from at_import_time(node)


def imported_at_import_time(tree: ast.AST) -> Iterator[str]:
    for node in at_import_time(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(ast.Module([node], []))


def ours(name: str) -> str | None:
    """The room that an imported name belongs to; None where it is not ours."""
    if name.split(".")[0] != "server":
        return None
    below = room(name.removeprefix("server").lstrip("."))
    known = {room(module(path)) for path in FILES}
    return below if below in known else ""


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_go_downwards(path: Path) -> None:
    own = room(module(path))
    assert own in MAY_IMPORT, f"say in MAY_IMPORT what {own} may import"
    rooms = {ours(name) for name in imports(ast.parse(path.read_text()))} - {None, own}
    assert rooms <= MAY_IMPORT[own]


def test_the_arrows_have_no_circle() -> None:
    """What the table permits, followed to its end, never comes back."""
    reached = {own: set(others) for own, others in MAY_IMPORT.items()}
    for _ in MAY_IMPORT:
        for others in reached.values():
            others |= {further for other in list(others) for further in reached[other]}
    assert [own for own, others in reached.items() if own in others] == []


@pytest.mark.parametrize("path", FILES, ids=module)
def test_torch_is_loaded_only_where_it_computes(path: Path) -> None:
    name = module(path)
    if not {name, room(name)} & MAY_LOAD_TORCH:
        heads = {imported.split(".")[0] for imported in imported_at_import_time(ast.parse(path.read_text()))}
        assert not heads & {"torch", "transformers"}


def test_the_port_opens_before_torch_is_imported() -> None:
    code = """
import sys
import server.cli, server.config, server.flags, server.logs, server.generation, server.step, server.metrics
import server.api.app, server.api.server, server.engine, server.scheduler.scheduler, server.text.tokenizer
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
