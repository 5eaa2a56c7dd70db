"""The command `sluice`: serve a model, plan its memory, measure a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from server import __version__

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible HTTP interface",
    "plan": "say how much memory a model's cache takes, and what fits",
    "bench": "measure any OpenAI-compatible server under load",
    "version": "print the version",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 for done, 1 for failed, 2 for not understood."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    try:
        if command in ("-h", "--help", "help"):
            print(_overview())
            return 0
        if command in ("version", "--version"):
            print(f"sluice {__version__}")
            return 0
        if command == "serve":
            return _serve(arguments)
        if command == "plan":
            from server import plan

            return plan.main(arguments)
        if command == "bench":
            from server import bench

            return bench.main(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone. What is still buffered would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    from server.flags import nearest

    print(f"sluice: {command!r} is no command{nearest(command, list(COMMANDS))}", file=sys.stderr)
    return 2


def _serve(arguments: Sequence[str]) -> int:
    from server.flags import SettingsError, load_settings

    try:
        settings = load_settings(arguments)
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"sluice serve: {line}", file=sys.stderr)
        return 2

    from server.api.server import serve
    from server.logs import set_up_logging

    set_up_logging(settings.log_level, settings.log_format)
    return serve(settings)


def _overview() -> str:
    lines = [f"  sluice {name:<9}{text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: sluice COMMAND [options]", "", *lines, "", "'sluice COMMAND --help' says more."])
