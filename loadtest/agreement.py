"""Do load tools agree on one server, and with what that server counted itself?

    python -m loadtest.agreement --guidellm ENV/bin/guidellm --aiperf ENV/bin/aiperf --tokenizer DIR
    python -m loadtest.agreement --url http://127.0.0.1:8000 --requests 128 --concurrency 16

Each tool in turn puts the same closed loop on a Sluice server: as many requests and clients, prompts and answers of as
many tokens, greedy, without an end of sequence. The prompts are new each time, so the prefix cache answers for none.
Turns repeat in rotating order, as machines are not equally fast at all times, and the medians over the turns are
printed. Tools that are not given are left out. Without --url a server of our own is started; it gets one half of the
CPUs of this machine and the tools the other. --tokenizer is a directory with the model's tokenizer, which guidellm and
aiperf make their prompts with; the default is that of the embedded model. Exit status: 0 if tokens/s and mean TTFT of
all tools are within --within of their median, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.counts import Counts, Watch
from loadtest.probe import long_prompt
from loadtest.tools import ROOT, AIPerf, Figures, GuideLLM, Locust, ReportError, SluiceBench, Task, Tool
from server.bench.client import BenchError, Client
from server.bench.load import model_of
from server.bench.process import end, own_server, run_until_told
from server.bench.report import align

TOOL_SECONDS = 1800.0  # that one turn of a tool may take
ATTEMPTS = 8  # at a prompt of the right length
SAME = 0.03  # how far prompt lengths (relatively) and cached shares may be apart
TAIL_BYTES = 2000  # of a tool's output that are shown where it failed


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a tool: what it reports, and what the server counted meanwhile."""

    reported: Figures
    counted: Counts


async def prompts_of(client: Client, tokens: int, count: int, seed: int) -> list[str]:
    """So many prompts of exactly so many tokens, by the server's tokenizer; no two of them begin alike."""
    rng = random.Random(seed)
    return [await _prompt_of(client, tokens, rng) for _ in range(count)]


async def _prompt_of(client: Client, tokens: int, rng: random.Random) -> str:
    words = long_prompt(tokens, rng.getrandbits(32)).split()
    for _ in range(ATTEMPTS):
        prompt = " ".join(words)
        response = await client.request("POST", "/tokenize", {"prompt": prompt, "add_special_tokens": False})
        if response.status != 200:
            raise BenchError(f"/tokenize answers {response.error}")
        try:
            missing = tokens - int(response.json()["count"])
        except (ValueError, LookupError, TypeError):
            raise BenchError(f"/tokenize answers {response.body[:80]!r}, which names no count") from None
        if not missing:
            return prompt
        words = words[:missing] if missing < 0 else words + long_prompt(missing, rng.getrandbits(32)).split()
    raise BenchError(f"found no prompt of {tokens} tokens")


async def run_tool(tool: Tool, task: Task, folder: Path) -> Figures:
    """Raises BenchError, with the end of what the tool said, where it fails or reports what it should not."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *tool.command(task, folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=tool.environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(TOOL_SECONDS):
                output, _ = await process.communicate()
        except TimeoutError:
            raise BenchError(f"{tool.name} was not done within {TOOL_SECONDS:.0f} s") from None
        finally:
            await end(process)
        log.seek(0)
        said = (output + log.read())[-TAIL_BYTES:].decode("utf-8", "replace")
    if process.returncode:
        raise BenchError(f"{tool.name} ended with status {process.returncode}:\n{said}")
    try:
        figures = tool.figures(folder, output)
    except (ReportError, OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{tool.name}: {type(error).__name__}: {error}\n{said}") from None
    if figures.requests != task.requests:
        raise BenchError(f"{tool.name} reports {figures.requests} requests of {task.requests}")
    return figures


async def compare(task: Task, tools: Sequence[Tool], turns: int) -> dict[str, list[Turn]]:
    """Each tool `turns` times, with prompts of its own each time."""
    client = Client(task.url)
    results: dict[str, list[Turn]] = {tool.name: [] for tool in tools}
    for turn in range(turns):
        for place in range(len(tools)):
            tool = tools[(turn + place) % len(tools)]
            seed = task.seed + turn * len(tools) + place
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                prompts = await prompts_of(client, task.prompt_tokens, task.requests, seed)
                file = folder / "prompts.jsonl"
                file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
                async with Watch(client) as watch:
                    reported = await run_tool(tool, replace(task, seed=seed, prompts=file), folder)
                    result = Turn(reported, await watch.counts())
            results[tool.name].append(result)
            print(f"turn {turn + 1}: {tool.name:<13} {reported.tokens_per_s:8.1f} tokens/s", file=sys.stderr)
    return results


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of a tool over its turns."""

    name: str
    tokens_per_s: float
    tokens_per_s_counted: float
    ttft: float
    ttft_counted: float
    ttft_p50: float
    inter_token: float
    inter_token_counted: float

    @classmethod
    def of(cls, name: str, turns: Sequence[Turn]) -> Row:
        def median(side: str, figure: str) -> float:
            return statistics.median(float(getattr(getattr(turn, side), figure)) for turn in turns)

        return cls(
            name,
            median("reported", "tokens_per_s"),
            median("counted", "tokens_per_s"),
            median("reported", "ttft_mean"),
            median("counted", "ttft_mean"),
            median("reported", "ttft_p50"),
            median("reported", "inter_token_mean"),
            median("counted", "inter_token_mean"),
        )


def table(rows: Sequence[Row]) -> str:
    """Each figure beside what the server counted, and over the median of all tools."""
    head = ["tool"]
    for name in ("tok/s", "TTFT mean", "ITL mean"):
        head += [name, "server's", "/ server's", "/ median"]
    lines = [[*head, "TTFT p50"]]
    for row in rows:
        cells = [row.name]
        for figure, scale in (("tokens_per_s", 1), ("ttft", 1000), ("inter_token", 1000)):
            own, counted = getattr(row, figure), getattr(row, f"{figure}_counted")
            cells += [f"{own * scale:.1f}", f"{counted * scale:.1f}", f"{own / counted:.3f}"]
            cells.append(f"{own / _median(rows, figure):.3f}")
        lines.append([*cells, f"{row.ttft_p50 * 1000:.1f}"])
    return align(lines)


def deviation(rows: Sequence[Row], counted: bool = False) -> float:
    """The largest relative distance of a tool's tokens/s or mean TTFT from the median of all, or from the server's."""
    distances = []
    for figure in ("tokens_per_s", "ttft"):
        median = _median(rows, figure)
        for row in rows:
            expected = getattr(row, f"{figure}_counted") if counted else median
            distances.append(abs(float(getattr(row, figure) / expected) - 1))
    return max(distances)


def _median(rows: Sequence[Row], figure: str) -> float:
    return statistics.median(float(getattr(row, figure)) for row in rows)


def remarks(tools: Sequence[Tool], results: dict[str, list[Turn]]) -> list[str]:
    """What one must know to read the table: definitions, and where the load was not the same."""
    lines = [f"{tool.name}: {tool.definition}." for tool in tools]
    loads = {name: _load_of([turn.counted for turn in turns]) for name, turns in results.items()}
    length, cached = (statistics.median(values) for values in zip(*loads.values(), strict=True))
    lines.append(f"The server counted {length:.1f} prompt tokens a request, {cached:.1%} of them cached (medians).")
    for name, (own_length, own_cached) in loads.items():
        if abs(own_length / length - 1) > SAME or abs(own_cached - cached) > SAME:
            lines.append(
                f"Not the same load: {own_length:.1f} prompt tokens for {name}, {own_cached:.1%} of them cached."
            )
    return lines


def _load_of(counts: Sequence[Counts]) -> tuple[float, float]:
    """Prompt tokens a request, and the share of them that the prefix cache answered for."""
    prompt_tokens = sum(one.prompt_tokens for one in counts)
    return prompt_tokens / sum(one.requests for one in counts), sum(one.cached_tokens for one in counts) / prompt_tokens


@asynccontextmanager
async def server_at(options: argparse.Namespace) -> AsyncIterator[str]:
    """The server at --url, or our own on the first half of the CPUs, with what is started later on the other."""
    if options.url:
        yield options.url
        return
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    if half:
        os.sched_setaffinity(0, cpus[:half])  # inherited
    async with own_server(options.flags, lambda phase: None) as url:
        if half:
            os.sched_setaffinity(0, cpus[half:])
        yield url


def tools_of(options: argparse.Namespace) -> list[Tool]:
    tools: list[Tool] = [SluiceBench(), Locust()]
    if options.guidellm:
        tools.append(GuideLLM(options.guidellm))
    if options.aiperf:
        tools.append(AIPerf(options.aiperf))
    return tools


def tokenizer_of(options: argparse.Namespace) -> Path:
    if options.tokenizer:
        return Path(options.tokenizer)
    from server.model.embedded import embedded_model  # late: it imports torch

    return embedded_model(lambda doing, fraction: None)


async def measure(options: argparse.Namespace, tools: Sequence[Tool]) -> tuple[Task, dict[str, list[Turn]]]:
    tokenizer = tokenizer_of(options) if any(tool.needs_tokenizer for tool in tools) else None
    async with server_at(options) as url:
        task = Task(
            url=url,
            model=await model_of(Client(url)),
            chat=options.chat,
            concurrency=options.concurrency,
            requests=options.requests,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            seed=secrets.randbelow(2**31),  # lest a cache knew the prompts from an earlier comparison
            prompts=Path(),
            tokenizer=tokenizer,
        )
        return task, await compare(task, tools, options.turns)


def report(task: Task, results: dict[str, list[Turn]], tools: Sequence[Tool], within: float) -> bool:
    """Print what was found; whether the tools agree."""
    rows = [Row.of(name, turns) for name, turns in results.items()]
    load = f"{task.requests} requests, {task.concurrency} at a time, {task.prompt_tokens} tokens in"
    turns = len(next(iter(results.values())))
    print(f"{load}, {task.output_tokens} out, medians of {turns} turns; times in milliseconds")
    print(table(rows))
    print("\n".join(remarks(tools, results)))
    apart = deviation(rows)
    print(f"Largest distance in tokens/s and mean TTFT from the median of the tools: {apart:.1%}")
    print(f"Largest distance from what the server counted in the same time: {deviation(rows, counted=True):.1%}")
    return apart <= within


def document(task: Task, results: dict[str, list[Turn]]) -> dict[str, Any]:
    return {"task": asdict(task), "tools": {name: [asdict(turn) for turn in turns] for name, turns in results.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.agreement", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", help="a Sluice server that runs already; else one is started")
    parser.add_argument("--guidellm", metavar="PATH", help="the program guidellm 0.8, as you installed it")
    parser.add_argument("--aiperf", metavar="PATH", help="the program aiperf 0.13, as you installed it")
    parser.add_argument("--tokenizer", metavar="DIR", help="of the model (default: the embedded model's)")
    parser.add_argument("--chat", action="store_true", help="chat instead of completions")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--within", type=float, default=0.1, help="share that the tools may be apart (default: 0.1)")
    parser.add_argument("--json", metavar="FILE", help="write all turns as JSON")
    parser.add_argument("flags", nargs="*", help="after --, options of the server that is started")
    options = parser.parse_args(argv)
    tools = tools_of(options)
    try:
        task, results = run_until_told(measure(options, tools))
    except (BenchError, OSError) as error:
        print(f"loadtest.agreement: {error}", file=sys.stderr)
        return error.status if isinstance(error, BenchError) else 1
    agree = report(task, results, tools, options.within)
    if missing := [name for name in ("guidellm", "aiperf") if not getattr(options, name)]:
        print(f"Left out, as not given: {', '.join(missing)}")
    if options.json:
        Path(options.json).write_text(json.dumps(document(task, results), indent=2, default=str) + "\n")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
