import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import server.api.server
from server import __version__
from server.cli import COMMANDS, main
from server.config import ServeSettings

ROOT = Path(__file__).parent.parent


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == main(["--version"]) == 0
    assert capsys.readouterr().out == f"sluice {__version__}\n" * 2


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    page = capsys.readouterr().out
    assert all(f"sluice {name}" in page for name in COMMANDS)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert capsys.readouterr().err == "sluice: 'sevre' is no command; did you mean serve?\n"


def test_bad_option_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "eight"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sluice serve: --port is 'eight', but must be a whole number")
    assert captured.err.count("\n") == 1


def test_serve_starts_the_server_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeSettings] = []

    def serve(settings: ServeSettings) -> int:
        seen.append(settings)
        return 7

    monkeypatch.setattr(server.api.server, "serve", serve)
    monkeypatch.setattr("server.logs.set_up_logging", lambda *arguments: None)
    assert main(["serve", "gpt2", "--port", "9000"]) == 7
    assert (seen[0].model, seen[0].port) == ("gpt2", 9000)


def test_module_is_the_command() -> None:
    assert python("-m", "server", "version").stdout == f"sluice {__version__}\n"
    assert python("-m", "server", "serve", "--prot", "1").returncode == 2


def test_help_needs_no_torch() -> None:
    code = """
import sys
from server.cli import main
try:
    main(["serve", "--help"])
except SystemExit as end:
    print("exit", end.code, "torch" in sys.modules, "transformers" in sys.modules, file=sys.stderr)
"""
    done = python("-c", code)
    assert "--max-num-batched-tokens" in done.stdout
    assert done.stderr == "exit 0 False False\n"


def test_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m server serve --help | head -n 1", shell=True, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith("usage: sluice serve")
    assert done.stderr == ""


def test_installed_command_is_main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"sluice": "server.cli:main"}


def test_json_log_lines() -> None:
    code = """
import logging
from server.logs import set_up_logging
set_up_logging("info", "json")
log = logging.getLogger("server.engine")
log.debug("hidden")
logging.getLogger("transformers").info("hidden too")
log.info("loaded %s", "m\\u00fc", extra={"blocks": 7})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broke")
"""
    first, second = map(json.loads, python("-c", code).stderr.splitlines())
    assert (first["level"], first["logger"], first["message"], first["blocks"]) == (
        "info",
        "server.engine",
        "loaded mü",
        7,
    )
    assert first["time"].endswith("+00:00")
    assert "ZeroDivisionError" in second["exception"]


def test_text_log_lines() -> None:
    done = python(
        "-c", "from server.logs import *; set_up_logging('warning', 'text'); logging.getLogger('server').warning('x')"
    )
    assert done.stderr.endswith("WARNING x\n")
