"""Is every panel of the dashboards right? Real servers, a real Prometheus, and a load that counts for itself.

    python -m loadtest.panels                               # a table of what each panel shows
    python -m loadtest.panels --picture dashboard.png       # and the dashboard, drawn from it (needs chromium and npm)
    python -m loadtest.panels --picture docs/images/dashboard.png --rows "SLO,Tokens,KV pool"    # the README's picture

starts two servers on the embedded model with a small cache, watches them with Prometheus (on Debian: apt-get install
prometheus), and puts on them a load of every kind. Then it asks Prometheus for each query of each panel in
deploy/grafana/dashboards/, and holds the answers against what the clients counted. Exit status: 0 if all panels are
right, 1 if one is not, 2 if it could not be tried.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.panels.dashboard import FOLDER, load
from loadtest.panels.picture import PictureError, draw
from loadtest.panels.prometheus import PrometheusError
from loadtest.panels.proof import Line, Shown, prove
from loadtest.panels.stage import staged
from loadtest.panels.traffic import LONG, QUICK
from server.bench.client import BenchError
from server.bench.process import Stopped, run_until_told


def table(shown: Sequence[Shown]) -> str:
    """A line for each series; what the clients say stands beside what they know."""
    rows = [f"{'panel':34} {'series':38} {'last':>10} {'peak':>10} {'whole load':>11}  the clients say"]
    for panel in shown:
        title = f"{panel.panel.title[:34]:34}"
        rows.extend(f"{title} {line.name[:38]:38} {_values(line)}" for line in panel.lines)
        rows.extend(f"{title} WRONG: {problem}" for problem in panel.problems)
    return "\n".join(rows)


def _values(line: Line) -> str:
    whole = "" if line.whole is None else f"{line.whole:.4g}"
    return f"{line.last:10.4g} {line.peak:10.4g} {whole:>11}  {_said(line)}".rstrip()


def _said(line: Line) -> str:
    if line.expected is None:
        return ""
    low, high, how = line.expected.low, line.expected.high, line.expected.how
    bounds = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    return f"{bounds} in all" if how == "total" else f"{bounds} ({how})"


async def run(options: argparse.Namespace) -> int:
    def show(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    wrong = 0
    async with staged(QUICK if options.quick else LONG, options.servers, show) as stage:
        for path in sorted(FOLDER.glob("*.json")):
            dashboard = load(path)
            shown = await prove(stage, dashboard)
            print(f"{dashboard.title}: {len(shown)} panels\n{table(shown)}\n")
            wrong += sum(bool(panel.problems) for panel in shown)
            if options.picture is not None and dashboard.uid == options.dashboard:
                await draw(stage, dashboard, options.rows, options.picture)
    print(f"{wrong} panels are wrong" if wrong else "all panels are right")
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.panels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the short load of the tests, instead of some minutes")
    parser.add_argument("--picture", type=Path, help="where to draw the dashboard as a PNG (needs chromium and npm)")
    parser.add_argument("--dashboard", default="sluice", help="uid of the dashboard that is drawn")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=(), help="rows that are drawn, else all")
    try:
        return run_until_told(run(parser.parse_args(argv)))
    except (BenchError, PrometheusError, PictureError) as error:
        print(f"cannot try the panels: {error}", file=sys.stderr)
        return error.status if isinstance(error, Stopped) else 2


if __name__ == "__main__":
    sys.exit(main())
