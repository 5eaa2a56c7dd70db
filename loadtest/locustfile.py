"""Load on an OpenAI-compatible server with locust.

    locust -f loadtest/locustfile.py --headless -H http://host:8000 -u 16 -r 16 -t 2m -s 60
    locust -f loadtest/locustfile.py --headless -H http://host:8000 --shape spike --shape-users 64 --shape-time 5m
    locust -f loadtest/locustfile.py --headless -H http://host:8000 -u 8 -r 8 --requests 64 ShortPrompt

Users of five kinds, by weight; name some after the options to run only those. Rows named after a path are whole
requests, with the failures; rows of type LLM are the latencies of those that succeeded. loadtest/README.md has more.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gevent
from locust import LoadTestShape, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import LocalRunner, MasterRunner, WorkerRunner
from locust.util.timespan import parse_timespan

from loadtest.llm_user import LLMUser, Load
from loadtest.shapes import SHAPES, Shape, users_at
from loadtest.totals import Totals
from server.bench.client import BenchError
from server.bench.report import table

CHAT_TURNS = 4
STOP_SECONDS = 60.0  # that streams under way at the end may take, unless --stop-timeout says otherwise
TOTALS = "sluice_totals"

logger = logging.getLogger(__name__)


class ShortPrompt(LLMUser):
    """A question of some words, new to any cache."""

    weight = 4
    kind = "short"

    @task
    def turn(self) -> None:
        self.complete(self.load.prompt())


class LongPrompt(LLMUser):
    """Much to read before the first token, new to any cache."""

    weight = 1
    kind = "long"

    @task
    def turn(self) -> None:
        self.complete(self.load.tag() + self.load.long_text + "\n\n" + self.load.prompt())


class SharedPrefix(LLMUser):
    """Different questions behind one text, as of an application with a system prompt."""

    weight = 2
    kind = "prefix"

    @task
    def turn(self) -> None:
        self.complete(self.load.prefix + self.load.prompt())


class Conversation(LLMUser):
    """A chat whose history comes along with each turn, so that a prefix cache answers for most of it."""

    weight = 2
    kind = "chat"

    def on_start(self) -> None:
        super().on_start()
        self._history: list[dict[str, str]] = []

    @task
    def turn(self) -> None:
        if len(self._history) >= 2 * CHAT_TURNS:
            self._history.clear()
        asked = [*self._history, {"role": "user", "content": self.load.prompt()}]
        answer = self.chat(asked)
        if answer:
            self._history = [*asked, {"role": "assistant", "content": answer}]


class NotStreamed(LLMUser):
    """A chat answered in one piece."""

    weight = 1
    kind = "whole"

    @task
    def turn(self) -> None:
        self.chat([{"role": "user", "content": self.load.prompt()}], stream=False)


class ShapedLoad(LoadTestShape):
    """So many users at most, for so many seconds. Abstract, or locust would take it without being asked to."""

    abstract = True

    def __init__(self, shape: Shape, users: int, seconds: float) -> None:
        super().__init__()
        self.shape, self.users, self.seconds = shape, users, seconds

    def tick(self) -> tuple[int, float] | None:
        users = users_at(self.shape, self.users, self.get_run_time() / self.seconds)
        return None if users is None else (users, self.users)  # all that are missing at once


def _above_0(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be above 0")
        return value

    return parse


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument  # a group would not take what the web page needs to know
    add("--model", help="name to ask for (default: the server's first)")
    add("--api-key", env_var="SLUICE_API_KEY", help="bearer token", include_in_web_ui=False)
    add("--chat", action="store_true", help="ask for chat instead of completions throughout")
    add("--output-tokens", type=_above_0(int), default=64, metavar="N", help="of each answer at most")
    add("--ignore-eos", action="store_true", help="of each answer exactly, where the server knows how")
    add("--temperature", type=float, default=0.0, metavar="T")
    add("--long-prompt-tokens", type=_above_0(int), default=1000, metavar="N", help="about so many")
    add("--prefix-tokens", type=_above_0(int), default=500, metavar="N", help="about so many shared")
    add("--prompts", metavar="FILE", help="JSON lines or text (default: those of the bench)")
    add("--verbatim", action="store_true", help="no tag before each: repeated ones may be cached")
    add("--seed", type=int, default=0, metavar="N", help="of the order of prompts")
    add(
        "--constant-throughput",
        type=_above_0(float),
        metavar="R",
        help="requests a second that each user is to send, measured from when they were due",
    )
    add("--think-time", type=float, default=0.0, metavar="S", help="between requests of a user")
    add("--requests", type=_above_0(int), metavar="N", help="end after so many; in one process only")
    add("--request-timeout", type=_above_0(float), default=600.0, metavar="S")
    add("--retry-after", action="store_true", help="wait as long as a 429 or 503 says; it is a failure all the same")
    add("--shape", choices=list(SHAPES), help="of the number of users over time, instead of -u, -r, -t")
    add("--shape-users", type=_above_0(int), metavar="N", help="at most (default: 32)")
    add("--shape-time", type=parse_timespan, metavar="T", help="as 300, 5m or 1h (default: 3m)")
    add("--summary", metavar="FILE", help="write the totals as JSON")


@events.init.add_listener
def prepare(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    assert options is not None
    if options.shape and (options.num_users or options.spawn_rate or options.run_time):
        sys.exit("--shape decides on the number of users: use --shape-users and --shape-time instead of -u, -r and -t")
    if not options.shape and (options.shape_users or options.shape_time):
        sys.exit("--shape-users and --shape-time belong to --shape")
    if options.requests and not isinstance(environment.runner, LocalRunner):
        sys.exit("--requests counts in one process: leave out --master, --worker and --processes")
    if options.constant_throughput and options.think_time:
        sys.exit("--constant-throughput sets when requests are sent: leave out --think-time")
    if options.shape:
        environment.shape_class = ShapedLoad(
            SHAPES[options.shape], options.shape_users or 32, options.shape_time or 180
        )
        environment.shape_class.runner = environment.runner
    if not environment.stop_timeout:
        environment.stop_timeout = STOP_SECONDS  # a stream that we cut ourselves says nothing of the server
    try:
        LLMUser.load = Load(environment)
    except BenchError as error:
        sys.exit(str(error))
    # Gevent's timers count from when its loop last ran: the seconds that imports took would be missing from --run-time.
    gevent.get_hub().loop.update_now()


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    load = LLMUser.load
    load.totals, load.ending = Totals(), False
    load.cpu_seconds()
    runner = environment.runner
    assert runner is not None, "it has started"
    if isinstance(runner, MasterRunner):
        return  # it has no users
    try:
        load.find_model((environment.host or "").rstrip("/"))
    except RuntimeError as error:
        logger.error(error)
        environment.process_exit_code = 1
        gevent.spawn(runner.quit)  # not from within its start


@events.test_stopping.add_listener
def end(**_: Any) -> None:
    LLMUser.load.ending = True


@events.report_to_master.add_listener
def hand_over(data: dict[str, Any], **_: Any) -> None:
    load = LLMUser.load
    load.totals.cpu_seconds += load.cpu_seconds()
    data[TOTALS] = load.totals.dump()
    load.totals = Totals()


@events.worker_report.add_listener
def take_over(data: dict[str, Any], **_: Any) -> None:
    if TOTALS in data:
        LLMUser.load.totals.merge(Totals.load(data[TOTALS]))


@events.quitting.add_listener
def conclude(environment: Environment, **_: Any) -> None:
    """Let what is under way end, then write the summary. A run in which nothing succeeded has failed."""
    runner = environment.runner
    assert runner is not None, "it has run"
    if isinstance(runner, WorkerRunner):
        return
    runner.quit()
    load = LLMUser.load
    load.totals.cpu_seconds += load.cpu_seconds()
    levels = load.totals.levels()
    if levels[0].requests == levels[0].failures:
        environment.process_exit_code = 1
    if load.options.summary:
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": environment.host,
            "model": load.model,
            "given_up": load.totals.given_up,
            "levels": [level.json() for level in levels],
        }
        Path(load.options.summary).write_text(json.dumps(document, indent=2) + "\n")


@events.quit.add_listener
def tell(**_: Any) -> None:
    """The totals, after locust's own tables."""
    totals = LLMUser.load.totals
    if not totals.kinds:
        return
    level, *_others = levels = totals.levels()
    print(table(levels))
    print(f"{level.output_tokens_per_s:.1f} output tokens/s and {level.requests_per_s:.2f} requests/s", end=" ")
    print(f"over {level.seconds:.1f} s; {level.cached_tokens / max(1, level.input_tokens):.0%} of the prompts cached")
    if totals.given_up:
        print(f"{totals.given_up} requests were under way at the end and count nowhere")
