"""Runs a chat template as transformers does, with bounds on how long it may take and how much it may write."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

MAX_SECONDS = 10.0
MAX_CHARACTERS = 2**26
_MAX_MESSAGE = 500

_deadline: ContextVar[float] = ContextVar("deadline")


class TemplateFailed(ValueError):
    """The template does not render these messages. The message is the template's own sentence, bounded in size."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "…")


class CompiledTemplate:
    """A Jinja template in the sandbox that transformers gives chat templates. Safe to use from any thread.

    Raises:
        TemplateFailed: the source is no Jinja template.
    """

    def __init__(self, source: str) -> None:
        import jinja2

        try:
            self._template = _compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailed(f"line {error.lineno}: {error.message}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text the template writes.

        Raises:
            TemplateFailed: it raised an error, takes more than `MAX_SECONDS` or writes more than `MAX_CHARACTERS`.
        """
        token = _deadline.set(time.monotonic() + MAX_SECONDS)
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise TemplateFailed(f"it writes more than {MAX_CHARACTERS:,} characters")
                pieces.append(piece)
        except TemplateFailed:
            raise
        except Exception as error:  # a template is a program: whatever goes wrong in it is its answer to the messages
            raise TemplateFailed(str(error) or type(error).__name__) from None
        finally:
            _deadline.reset(token)
        return "".join(pieces)


def _compile(source: str) -> Template:
    """Compile in transformers' environment, with a check of the time in every turn of a loop and bounds on products.

    Jinja has no `while`, and its sandbox bounds `range`; loops within loops and repeated strings are what is left.
    """
    from jinja2.compiler import CodeGenerator, Frame
    from transformers.utils.chat_template_utils import _compile_jinja_template

    class Timed(CodeGenerator):
        def blockvisit(self, nodes: Any, frame: Frame) -> None:
            self.writeline("environment.check_time()")
            super().blockvisit(nodes, frame)

    compiled = _compile_jinja_template(source)
    environment: Any = compiled.environment.overlay()
    environment.code_generator_class = Timed
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.check_time = _check_time
    environment.call_binop = _bounded_binop(environment)
    template: Template = environment.from_string(source)
    return template


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise TemplateFailed(f"it takes more than {MAX_SECONDS:g} seconds")


def _bounded_binop(environment: Any) -> Any:
    operators = environment.binop_table

    def call(context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 2**16 or abs(right) > 2**6):
            raise TemplateFailed("it computes a power that is too large")
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and len(value) * count > MAX_CHARACTERS:
                    raise TemplateFailed(f"it repeats a text to more than {MAX_CHARACTERS:,} characters")
        return operators[operator](left, right)

    return call
