"""Reads the options of `sluice serve` from flags, environment and a config file, and says what is wrong with them.

A flag wins over a `SLUICE_...` variable, which wins over the file named by `--config`, which wins over the default.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from server.config import ENV_PREFIX, Environment, ServeSettings


class SettingsError(Exception):
    """Options that cannot be used. The message has one line for each, naming the option and what is possible."""


def load_settings(argv: Sequence[str], prog: str = "sluice serve") -> ServeSettings:
    """Read flags, environment and config file. `--help` prints and exits.

    Raises SettingsError with everything that is wrong, one line each.
    """
    flags = _parse_flags(argv, prog)
    path = flags.pop("config", None) or os.environ.get(f"{ENV_PREFIX}CONFIG")
    environment = Environment(ServeSettings)()
    _check_variables(os.environ)
    from_file = _read_file(Path(path)) if path else {}
    origins = (
        dict.fromkeys(from_file, f"in {path}")
        | {name: f"from {ENV_PREFIX}{name.upper()}" for name in environment}
        | dict.fromkeys(flags, "")
    )
    try:
        return ServeSettings(**{**from_file, **environment, **flags})
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(error, origins))) from None


def nearest(word: str, known: Sequence[str]) -> str:
    """'; did you mean X?' where a known name looks like `word`, else nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _flag(name: str) -> str:
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def _detail(field: FieldInfo, key: str) -> str | None:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    value = extra[key]
    return str(value) if value else None


def _bounds(field: FieldInfo) -> dict[str, Any]:
    return {
        name: getattr(rule, name)
        for rule in field.metadata
        for name in ("ge", "gt", "le")
        if getattr(rule, name, None) is not None
    }


def _choices(field: FieldInfo) -> tuple[str, ...]:
    kinds = (field.annotation, *get_args(field.annotation))  # an optional choice is a union with None
    return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())


def _expected(field: FieldInfo) -> str:
    """What values an option can have, in words."""
    if written := _detail(field, "expects"):
        return written
    if field.annotation is bool:
        return "true or false"
    if choices := _choices(field):
        return "one of " + ", ".join(choices)
    bounds = _bounds(field)
    kind = "a number" if field.annotation in (float, float | None) else "a whole number"
    low = f"above {bounds['gt']}" if "gt" in bounds else f"of at least {bounds['ge']}"
    return f"{kind} {low}" + (f" and at most {bounds['le']}" if "le" in bounds else "")


def _explain(error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        if not item["loc"]:
            lines[item["msg"]] = item["msg"]
            continue
        name = str(item["loc"][0])
        value = item["input"]  # for a list option, the item that is wrong
        origin = f" ({origins[name]})" if origins.get(name) else ""
        field = ServeSettings.model_fields[name]
        given = "'***'" if _detail(field, "secret") else repr(value)
        lines[name] = f"{_flag(name)} is {given}{origin}, but must be {_expected(field)}"
    return list(lines.values())


def _check_variables(environ: Mapping[str, str]) -> None:
    """Refuse a misspelt variable. Others of our prefix are let be: Kubernetes and compose set such names too."""
    known = [ENV_PREFIX + name.upper() for name in ServeSettings.model_fields] + [f"{ENV_PREFIX}CONFIG"]
    if environ.get(f"{ENV_PREFIX}API_KEY") == "":
        # Other empty variables are no value; this one would open the server to everybody.
        raise SettingsError(f"{ENV_PREFIX}API_KEY is empty: give it a key, or unset it to ask for none")
    for name in environ:
        if not name.startswith(ENV_PREFIX) or name in known or re.match(ENV_PREFIX + r"(SERVICE|PORT)_", name):
            continue
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.9):
            raise SettingsError(f"{name} is no option; did you mean {close[0]}?")


def _read_file(path: Path) -> dict[str, Any]:
    """The options of a TOML or YAML file; a key may be written with '-' or '_'."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SettingsError(f"--config {path}: cannot be read ({reason})") from None
    values = _parse_file(path, text)
    if not isinstance(values, dict):
        raise SettingsError(f"--config {path}: must be a list of 'option: value' lines")
    known = list(ServeSettings.model_fields)
    options: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise SettingsError(f"--config {path}: {key!r} is no option{nearest(name, known)}")
        if name in options:
            raise SettingsError(f"--config {path}: {name} is given twice")
        if value is not None:
            options[name] = value
    return options


def _parse_file(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"--config {path}: is no valid TOML: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise SettingsError(f"--config {path}: is no valid YAML: {' '.join(str(error).split())}") from None
    raise SettingsError(f"--config {path}: must end in .toml, .yaml or .yml")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SettingsError(message.removeprefix("argument "))


def _parse_flags(argv: Sequence[str], prog: str) -> dict[str, Any]:
    """The options given as flags, their values still text: ServeSettings checks all sources alike."""
    parser = build_parser(prog)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise SettingsError(f"{word!r} is one argument too many: give one MODEL, and put flags before their values")
        if word == "--model":
            raise SettingsError(f"--model is no option: name the model alone, as in '{prog} MODEL'")
        known = ["--config", "--help"]
        for name, field in ServeSettings.model_fields.items():
            known += [_flag(name), "--no-" + _flag(name)[2:]] if field.annotation is bool else [_flag(name)]
        raise SettingsError(f"{word} is no option{nearest(word, known)} ('{prog} --help' lists them all)")
    return vars(values)


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the flags, with a help page grouped by subject. Options not given leave no value behind."""
    width = min(shutil.get_terminal_size().columns, 110)
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [MODEL] [options]",
        description="Serve a Hugging Face model over an OpenAI-compatible HTTP interface.",
        epilog="Each option may also be given as an environment variable, --max-num-seqs 64 as SLUICE_MAX_NUM_SEQS=64, "
        "or in a config file, as max_num_seqs: 64. A flag wins over a variable, a variable over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=width),
    )
    parser.add_argument("--config", metavar="FILE", help="read options from a TOML or YAML file")
    groups: dict[str, Any] = {}
    for name, field in ServeSettings.model_fields.items():
        title = str(_detail(field, "group"))
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = "on" if field.default is True else "off" if field.default is False else field.default
        text = f"{field.description} (default: {_detail(field, 'shown') or default})"
        _add_flag(groups[title], name, field, text)
    return parser


def _add_flag(group: Any, name: str, field: FieldInfo, text: str) -> None:
    help_text = text.replace("%", "%%")
    if name == "model":
        group.add_argument(name, nargs="?", metavar="MODEL", help=help_text)
    elif field.annotation is bool:
        group.add_argument(_flag(name), dest=name, action=argparse.BooleanOptionalAction, help=help_text)
    elif name == "served_model_name":
        group.add_argument(_flag(name), dest=name, nargs="+", action="extend", metavar="NAME", help=help_text)
    elif get_origin(field.annotation) is list:  # one value a flag, which may be given again
        metavar = name.rpartition("_")[2].upper()
        group.add_argument(_flag(name), dest=name, action="append", metavar=metavar, help=help_text)
    else:
        choices = _choices(field)
        number = field.annotation in (int, float, int | None, float | None) and name not in (
            "kv_bytes",
            "max_body_size",
        )
        metavar = "{" + ",".join(choices) + "}" if choices else "N" if number else name.rpartition("_")[2].upper()
        group.add_argument(_flag(name), dest=name, metavar=metavar, help=help_text)
