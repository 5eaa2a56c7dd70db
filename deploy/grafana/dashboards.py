"""Writes the Grafana dashboards.

    python -m deploy.grafana.dashboards           # writes deploy/grafana/dashboards/*.json
    python -m deploy.grafana.dashboards --check   # exit status 1 when they are not what this would write

The JSON is committed, so that nobody needs this to use it: Grafana is given the folder by its provisioning, or a file
by hand. After a change here or in overview.py, cache.py, internals.py, replicas.py, queries.py or panels.py,
run it and commit both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog import builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from deploy.grafana import overview, replicas
from deploy.grafana.panels import DATASOURCE, Panel
from deploy.grafana.queries import process

FOLDER = Path(__file__).parent / "dashboards"
TAG = "sluice"


class PrometheusAnnotation(models.AnnotationQuery, builder.Builder[models.AnnotationQuery]):
    """With the fields of Prometheus' own annotations, which the SDK's type leaves out."""

    def __init__(self, name: str, expr: str, colour: str, more: dict[str, object]) -> None:
        super().__init__(name=name, datasource=DATASOURCE, expr=expr, icon_color=colour)
        self._more = more

    def build(self) -> models.AnnotationQuery:
        return self

    def to_json(self) -> dict[str, object]:
        return super().to_json() | self._more


def restarts() -> PrometheusAnnotation:
    """A mark at each process's start: the value is the time, in milliseconds."""
    return PrometheusAnnotation(
        "Restarts",
        f"1000 * ({process('process_start_time_seconds')})",
        "blue",
        {"useValueForTime": True, "titleFormat": "{{instance}} started", "step": "30s"},
    )


def alerts() -> PrometheusAnnotation:
    """A bar as long as an alert fires."""
    return PrometheusAnnotation(
        "Alerts",
        'ALERTS{alertname=~"Sluice.*", alertstate="firing"}',
        "red",
        {"titleFormat": "{{alertname}}", "textFormat": "{{instance}} {{severity}}", "step": "30s"},
    )


def variables() -> list[builder.Builder[models.VariableModel]]:
    """The data source, the model and its instances.

    Model is a variable of several values, since Grafana quotes only those for use in a regular expression, and names of
    models have dots and pluses.
    """
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        dashboard.QueryVariable("model")
        .label("Model")
        .datasource(DATASOURCE)
        .query("label_values(sluice_build_info, model_name)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(False),
        dashboard.QueryVariable("instance")
        .label("Instance")
        .datasource(DATASOURCE)
        .query('label_values(sluice_build_info{model_name=~"$model"}, instance)')
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"])),
    ]


def assemble(
    uid: str, title: str, description: str, rows: Sequence[tuple[str, Sequence[Panel]]], other: tuple[str, str]
) -> models.Dashboard:
    """A dashboard of these rows; one without a title has no heading. `other`: uid and title of the one to link to."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG, "llm"])
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .variables(variables())
        .annotations([restarts(), alerts()])
        .link(
            dashboard.DashboardLink(other[1])
            .type(models.DashboardLinkType.LINK)
            .url(f"/d/{other[0]}")
            .icon("dashboard")
            .tooltip("The same models, instances and time")
            .include_vars(True)
            .keep_time(True)
        )
    )
    number = 0
    for heading, panels in rows:
        if heading:
            number += 1
            made.with_row(dashboard.Row(heading).id(number).collapsed(False))
        for panel in panels:
            number += 1
            made.with_panel(panel.id(number))
    return made.build()


def dashboards() -> dict[str, str]:
    """The text of each file, by its name."""
    names = {"sluice": "Sluice", "sluice-replicas": "Sluice by replica"}
    made = [
        assemble(
            "sluice",
            names["sluice"],
            "The chosen instances as one server: sums, ratios of sums, quantiles of summed buckets.",
            overview.rows(),
            ("sluice-replicas", names["sluice-replicas"]),
        ),
        assemble(
            "sluice-replicas",
            names["sluice-replicas"],
            "A line for each instance: which of them differs from its peers.",
            replicas.rows(),
            ("sluice", names["sluice"]),
        ),
    ]
    encoder = JSONEncoder(indent=2, sort_keys=True, ensure_ascii=False)
    return {f"{each.uid}.json": encoder.encode(each) + "\n" for each in made}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.dashboards", description="Write the dashboards.")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    options = parser.parse_args(argv)
    status = 0
    for name, text in dashboards().items():
        path = FOLDER / name
        current = path.exists() and path.read_text() == text
        if options.check:
            print(f"{path}: {'up to date' if current else 'out of date; run this without --check'}")
            status |= not current
        elif not current:
            path.write_text(text)
            print(f"{path}: written")
    return status


if __name__ == "__main__":
    sys.exit(main())
