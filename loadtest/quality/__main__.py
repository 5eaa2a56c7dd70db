"""What does each way to keep less of the KV cache gain, and what does it cost?

    python -m loadtest.quality
    python -m loadtest.quality --parts needle --device cuda
    python -m loadtest.quality --quick

prints what each choice of cache takes of memory and, on the embedded model, what it does to quality and speed. Quality
is measured on a real text (Newton, Opticks, 1730, Query 31), computed by the scheduler and the runner as a server
does: in chunks, over the paged pool, and where a budget holds, over what it has left of the text by then.

perplexity: of the second half of a text of --length tokens, given all before each token. needle: the loss of a passkey
of five digits, asked for at the end of a text that names it in its first quarter. speed: how fast eight sequences are
continued, by turns. "H2O, 1/4" keeps a quarter of the length, heavy hitters by attention and the newest tokens;
"window, 1/4" the first four tokens and the newest. Memory and quality are the same at each run, speed is not. Exit
status: 0 if the perplexity of int8 is within 0.5 % of float32's and H2O is ahead of the window at every equal budget,
else 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from loadtest.quality.choices import BLOCK_SIZE, CHOICES, FULL, SHARES, Choice, Served
from loadtest.quality.memory import memory_table
from loadtest.quality.needle import ask_all, make_needles, mean_loss, needle_table
from loadtest.quality.perplexity import Reader, Reading, perplexity_table, read_all
from loadtest.quality.speed import SEQUENCES, race, speed_table
from server.config import ServeSettings
from server.model.errors import ModelLoadError
from server.model.loader import load_model
from server.text.tokenizer import Tokenizer

PARTS = ("perplexity", "needle", "speed")
POOL_BYTES = 256 * 2**20
ALLOWED = 0.005  # of the perplexity, for int8


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is done. length: tokens of the text whose perplexity is measured.

    needles, needle_length: how many passkeys, and the tokens of the prompt around each.
    context: tokens of the prompts that are continued; rounds, steps: of the turns that take.
    """

    length: int
    needles: int
    needle_length: int
    context: int
    rounds: int
    steps: int


FULL_SCOPE = Scope(2048, 8, 600, 512, 15, 4)
QUICK = Scope(512, 2, 320, 128, 3, 4)


def passage() -> str:
    """The text, its paragraphs each on a line of its own."""
    text = (files("loadtest.quality") / "opticks.txt").read_text(encoding="utf-8")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


class Findings:
    """Measures the parts and prints their tables. `verdicts`: what was to be shown, and whether it was."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, scope: Scope, seed: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.scope = scope
        self.seed = seed
        self.text = tokenizer.encode(passage())
        self.verdicts: list[tuple[str, bool]] = []

    def memory(self) -> None:
        layout = Served(self.model, FULL).layout
        print(f"memory: sequences of {self.scope.length:,} tokens, blocks of {BLOCK_SIZE}")
        print(memory_table(layout, CHOICES, self.scope.length, POOL_BYTES), flush=True)

    def perplexity(self) -> None:
        ids = self.text[: self.scope.length]
        start = len(ids) // 2
        readings = read_all(self.model, Reader(ids, start), CHOICES, _show)
        print(f"\nperplexity: tokens {start + 1:,} to {len(ids):,} of the text, each given all before it")
        print(perplexity_table(readings), flush=True)
        ratio = _of(readings, "int8").perplexity / readings[FULL].perplexity
        self.verdicts.append((f"int8 / float32 perplexity is {ratio:.4f}", abs(ratio - 1) <= ALLOWED))
        for h2o, window in _pairs():
            ahead = readings[window].perplexity - readings[h2o].perplexity
            self.verdicts.append((f"perplexity of {h2o.name} is {ahead:.3f} below that of {window.name}", ahead > 0))

    def needle(self) -> None:
        scope = self.scope
        needles = make_needles(self.tokenizer.encode, self.text, scope.needles, scope.needle_length, self.seed)
        answers = ask_all(self.model, CHOICES, needles, _show)
        print(f"\nneedle: {scope.needles} passkeys of 5 digits, each in a text of {scope.needle_length} tokens")
        print(needle_table(answers), flush=True)
        for h2o, window in _pairs():
            ahead = mean_loss(answers[window]) - mean_loss(answers[h2o])
            self.verdicts.append((f"needle loss of {h2o.name} is {ahead:.3f} below that of {window.name}", ahead > 0))

    def speed(self) -> None:
        scope = self.scope
        prompts = [self.text[start : start + scope.context] for start in range(0, 64 * SEQUENCES, 64)]
        speeds = race(self.model, CHOICES, prompts, scope.rounds, scope.steps, _show)
        print(
            f"\nspeed: {SEQUENCES} sequences of {scope.context} tokens continued, "
            f"medians of {scope.rounds} turns of {scope.steps} steps"
        )
        print(speed_table(speeds), flush=True)


def _of(found: dict[Choice, Reading], name: str) -> Reading:
    return next(reading for choice, reading in found.items() if choice.name == name)


def _pairs() -> list[tuple[Choice, Choice]]:
    """H2O and the window with the same numbers and budget."""
    window = {(choice.dtype, choice.share): choice for choice in CHOICES if choice.policy == "window"}
    return [
        (choice, window[choice.dtype, choice.share])
        for choice in CHOICES
        if choice.policy == "h2o" and (choice.dtype, choice.share) in window
    ]


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--quick", action="store_true", help="short texts and turns, which prove little")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of the text (default: 2048, or 512 with --quick)")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="that are continued (default: 512, or 128)")
    parser.add_argument("--seed", type=int, default=0, help="of the needles")
    options = parser.parse_args(argv)
    scope = QUICK if options.quick else FULL_SCOPE
    scope = replace(scope, length=options.length or scope.length, context=options.context or scope.context)
    try:
        loaded = load_model(ServeSettings(device=options.device, dtype="float32"), lambda doing, share: None)
    except (ModelLoadError, ValidationError) as error:
        parser.error(str(error))
    findings = Findings(loaded.model, loaded.tokenizer, scope, options.seed)
    room = len(findings.text)
    if not 4 * max(SHARES) <= scope.length <= room:
        parser.error(f"--length must be between {4 * max(SHARES)} and {room}, which the text has")
    if not 4 * max(SHARES) <= scope.context <= room - 64 * SEQUENCES:
        parser.error(f"--context must be between {4 * max(SHARES)} and {room - 64 * SEQUENCES}")
    print(
        f"{loaded.root} in float32 on {loaded.device}, {torch.get_num_threads()} threads; torch {torch.__version__}\n"
    )
    findings.memory()
    for part in PARTS:
        if part in options.parts:
            getattr(findings, part)()
    print()
    for claim, holds in findings.verdicts:
        print(f"{'as expected' if holds else 'NOT EXPECTED'}: {claim}")
    return 0 if all(holds for _, holds in findings.verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
