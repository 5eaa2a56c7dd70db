"""What the container, compose and provisioning files name must be there, and be what the code and `run` say.

`deploy/check_container.sh` builds and runs the image; it takes minutes and stands outside of these tests.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from server import __version__
from server.config import ENV_PREFIX, ServeSettings
from server.flags import load_settings
from server.model import embedded
from tests.programs import program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = [
    line.strip() for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines() if line.strip()
]
NUMERIC_USER = "10001:10001"
# Of the image's environment, what other programs than the server read.
FOREIGN_VARIABLES = {"SLUICE_CACHE"}


class _Loader(yaml.SafeLoader):
    """Reads compose's tag !reset as the value that follows."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    services: dict[str, Any] = yaml.load((DEPLOY / name).read_text(encoding="utf-8"), _Loader)["services"]
    return services


def instructions(keyword: str) -> list[str]:
    return [line.removeprefix(keyword).strip() for line in INSTRUCTIONS if line.startswith(keyword + " ")]


def arguments() -> dict[str, str]:
    """The build arguments and their defaults."""
    return dict(line.split("=", 1) for line in instructions("ARG"))


def environment() -> dict[str, str]:
    return dict(item.split("=", 1) for line in instructions("ENV") for item in shlex.split(line))


def mounts(service: str) -> dict[str, str]:
    """The files of deploy/ that a service sees: path in the container -> path below deploy/."""
    found = {}
    for volume in compose()[service]["volumes"]:
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            assert mode == ["ro"], f"{service} could change {source}"
            found[target] = source
    return found


def run_variable(name: str) -> str:
    match = re.search(rf"^{name}=(\S+)$", (ROOT / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match[1]


def test_hadolint_finds_nothing() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), DEPLOY / "Dockerfile"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_the_script_that_builds_and_runs_the_image_explains_itself() -> None:
    result = subprocess.run(
        [DEPLOY / "check_container.sh", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    options = set(re.findall(r"^    (--[a-z-]+)\)", (DEPLOY / "check_container.sh").read_text(), re.MULTILINE))
    assert options
    assert set(re.findall(r"^  (--[a-z-]+) ", result.stdout, re.MULTILINE)) == options


def test_versions_are_those_of_the_project() -> None:
    assert arguments()["TORCH"] == run_variable("TORCH")
    assert arguments()["TORCH_CPU_INDEX"] == run_variable("TORCH_CPU_INDEX")
    assert f"{embedded.PACKAGE}=={arguments()['EMBEDDED_MODEL']}" == run_variable("MODEL_PACKAGE")
    assert arguments()["EMBEDDED_MODEL"] == embedded.VERSION
    assert arguments()["VERSION"] == __version__
    assert compose()["sluice"]["image"] == f"sluice:{__version__}"
    assert compose("compose.cpu.yaml")["sluice"]["image"] == f"sluice:{__version__}-cpu"


def test_every_stage_stands_on_the_base_that_the_operator_chooses() -> None:
    stages = instructions("FROM")
    assert stages[0] == "${BASE_IMAGE} AS base"
    known = {"base"}
    for stage in stages[1:]:
        source, *name = stage.split(" AS ")
        assert source in known
        known.update(name)


def test_what_changes_least_comes_first() -> None:
    """A layer moves with an update only if it or one before it changed."""
    copied = [line.split()[0] for line in instructions("COPY") if line.startswith("--from=")]
    assert copied == ["--from=torch", "--from=dependencies", "--from=model", "--from=app"]
    last_stage = INSTRUCTIONS[[i for i, line in enumerate(INSTRUCTIONS) if line.startswith("FROM ")][-1] :]
    assert [line for line in last_stage if line.startswith(("COPY", "RUN"))][-1].startswith("COPY --from=app")
    torch_stage = DOCKERFILE[DOCKERFILE.index("FROM builder AS torch") : DOCKERFILE.index("FROM builder AS dep")]
    assert "COPY" not in torch_stage


def test_dependencies_are_those_of_the_lock_file() -> None:
    assert "pip install --no-deps --require-hashes --requirement /src/requirements.txt" in DOCKERFILE


def test_the_user_is_a_number_so_that_kubernetes_can_tell_it_is_not_root() -> None:
    assert instructions("USER") == [NUMERIC_USER]
    user, group = NUMERIC_USER.split(":")
    assert re.search(rf"install --directory --owner {user} --group {group} /models\b", " ".join(INSTRUCTIONS))


def test_the_process_can_be_stopped_and_asked() -> None:
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    assert instructions("ENTRYPOINT") == ['["tini", "--", "sluice"]']
    assert instructions("CMD") == ['["serve"]']
    assert len(instructions("HEALTHCHECK")) == 1
    assert instructions("EXPOSE") == [str(ServeSettings.model_fields["port"].default)]


def test_all_that_is_written_goes_to_the_volume() -> None:
    assert instructions("VOLUME") == ["/models"]
    for name in ("HF_HOME", "SLUICE_CACHE"):
        assert environment()[name].startswith("/models/")


@pytest.mark.parametrize("source", ["Dockerfile", "compose.yaml"])
def test_options_of_the_server_exist(source: str) -> None:
    given = environment() if source == "Dockerfile" else compose()["sluice"]["environment"]
    named = {name for name in given if name.startswith(ENV_PREFIX)} - FOREIGN_VARIABLES
    assert named
    assert {name.removeprefix(ENV_PREFIX).lower() for name in named} <= set(ServeSettings.model_fields)


def test_the_defaults_of_compose_are_options_that_the_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (environment() | compose()["sluice"]["environment"]).items():
        if name.startswith(ENV_PREFIX) and value is not None:  # None: what the shell has, if anything
            monkeypatch.setenv(name, value)
    settings = load_settings([])
    assert settings.host == "0.0.0.0"
    assert settings.model is None
    assert settings.public_metrics  # Prometheus has no key
    grace = int(compose()["sluice"]["stop_grace_period"].removesuffix("s"))
    assert grace >= settings.shutdown_timeout + 15, "compose would kill the server before it ends by itself"


def dockerignore(path: str) -> bool:
    """Whether .dockerignore keeps a path at the top of the repository out; the last line that matches decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#") and fnmatch(path, line.removeprefix("!")):
            ignored = not line.startswith("!")
    return ignored


def test_the_builder_gets_what_it_copies_and_nothing_else() -> None:
    copied = {path for line in instructions("COPY") if not line.startswith("--from=") for path in line.split()[:-1]}
    assert all((ROOT / path).exists() for path in copied)
    assert {path.name for path in ROOT.iterdir() if not dockerignore(path.name)} == copied


def test_what_compose_mounts_exists() -> None:
    for service in ("prometheus", "grafana"):
        for source in mounts(service).values():
            assert (DEPLOY / source).exists(), source


def test_images_are_pinned() -> None:
    for service in compose().values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])


def test_only_this_machine_reaches_the_ports_by_default() -> None:
    for service in compose().values():
        for port in service["ports"]:
            assert port.replace("${SLUICE_BIND:-127.0.0.1}", "127.0.0.1").startswith("127.0.0.1:")


def test_prometheus_finds_its_files_and_the_server() -> None:
    command, seen = compose()["prometheus"]["command"], mounts("prometheus")
    path = next(flag for flag in command if flag.startswith("--config.file=")).removeprefix("--config.file=")
    config = yaml.safe_load((DEPLOY / seen[path]).read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert job["job_name"] == "sluice"
    assert host in compose()
    assert [port] == instructions("EXPOSE")
    for rules in config["rule_files"]:
        folder, name = (Path(path).parent / rules).parent, Path(rules).name
        assert (DEPLOY / seen[str(folder)] / name).is_file()


def test_promtool_accepts_the_configuration() -> None:
    promtool = program("promtool", "prometheus")
    subprocess.run([promtool, "check", "config", DEPLOY / "prometheus" / "prometheus.yml"], check=True, timeout=60)


def test_grafana_finds_its_data_source_and_its_dashboards() -> None:
    seen = mounts("grafana")
    provisioning = DEPLOY / seen["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    address = re.fullmatch(r"http://(\w+):(\d+)", source["url"])
    assert address is not None
    host, port = address.groups()
    assert any(published.endswith(f":{port}") for published in compose()[host]["ports"])
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "sluice.yml").read_text())["providers"]
    dashboards = DEPLOY / seen[provider["options"]["path"]]
    assert list(dashboards.glob("*.json"))
    home = Path(compose()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (DEPLOY / seen[str(home.parent)] / home.name).is_file()


def test_the_override_needs_no_gpu() -> None:
    override = compose("compose.cpu.yaml")["sluice"]
    assert override["build"]["args"] == {"DEVICE": "cpu"}
    assert override["deploy"] is None
    assert "nvidia" in yaml.dump(compose()["sluice"]["deploy"])
