"""The Kubernetes manifests: valid by their schemas, and true to the command line, the routes, the metrics and the image that they name."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from fastapi.testclient import TestClient

from pagedcore.observe.catalogue import FAMILIES
from pagedcore.openai import build_app
from support.deployed import DEPLOY, read_yaml
from support.dockerfiles import stages
from support.fake_client import FakeClient
from support.kubernetes import BASE, K8S, OVERLAYS, Document, build, containers, documents, kustomization, pod

KUBECTL = shutil.which("kubectl")
VERSIONS = ("1.30", "1.37")
"""The oldest that knows all that is used here, and the newest whose schemas are at hand."""

BUILT = {name: build(folder) for name, folder in OVERLAYS.items()}
DEPLOYMENTS = {name: built["Deployment"] for name, built in BUILT.items()}
FOLDERS = [BASE, *OVERLAYS.values()]

of_each_overlay = pytest.mark.parametrize("name", list(OVERLAYS))
of_each_deployment = pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)


def container(deployment: Document) -> Document:
    (only,) = containers(deployment)
    return only


def image_of(deployment: Document) -> Any:
    """The last stage of the Dockerfile that makes the container's image."""
    return stages(DEPLOY / "docker" / f"Dockerfile.{container(deployment)['image'].removeprefix('pagedcore:')}")[-1]


# ---- the files


@pytest.mark.parametrize("version", VERSIONS)
@of_each_overlay
def test_every_resource_is_valid_by_the_schema_of_its_kind(name: str, version: str) -> None:
    for document in BUILT[name].values():
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_the_schemas_refuse_what_is_wrong() -> None:
    wrong = {**DEPLOYMENTS["cpu"], "replica": 1}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@of_each_overlay
def test_an_overlay_has_all_the_kinds(name: str) -> None:
    kinds = ["Deployment", "HorizontalPodAutoscaler", "PersistentVolumeClaim", "PodDisruptionBudget", "Service", "ServiceAccount"]
    assert sorted(BUILT[name]) == kinds


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_kustomization_names_what_is_there_and_all_of_it(folder: Path) -> None:
    asked = kustomization(folder)
    assert (asked["apiVersion"], asked["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    named = [*asked["resources"], *(patch["path"] for patch in asked.get("patches", []))]
    assert all((folder / name).exists() for name in named)
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == {name for name in named if name.endswith(".yaml")}


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
@of_each_overlay
def test_kubectl_builds_the_same(name: str) -> None:
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", str(OVERLAYS[name])], capture_output=True, text=True, check=True, timeout=240)
    assert {document["kind"]: document for document in yaml.safe_load_all(done.stdout)} == BUILT[name]


@of_each_overlay
def test_everything_finds_the_pods_by_their_label(name: str) -> None:
    built = BUILT[name]
    labels = built["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        built["Deployment"]["spec"]["selector"]["matchLabels"],
        built["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        built["Service"]["spec"]["selector"],
    ]
    assert selectors == [labels] * 3
    target = built["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", built["Deployment"]["metadata"]["name"])
    assert "replicas" not in built["Deployment"]["spec"], "it would undo the autoscaler at each apply"
    spec = pod(built["Deployment"])
    assert spec["serviceAccountName"] == built["ServiceAccount"]["metadata"]["name"]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [built["PersistentVolumeClaim"]["metadata"]["name"]]


# ---- the command and the image


@of_each_deployment
def test_the_command_is_the_images_and_its_flags_exist(deployment: Document) -> None:
    from pagedcore.cli import app

    one = container(deployment)
    assert one["command"] == image_of(deployment).command("ENTRYPOINT")[:2] == ["pagedcore", "serve"]
    serve: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {option for parameter in serve.params for option in parameter.opts}
    flags = [argument for argument in one["args"] if argument.startswith("--")]
    assert set(flags) <= known
    assert "--model" in flags
    assert one["args"][one["args"].index("--host") + 1] == "0.0.0.0"


@of_each_deployment
def test_the_port_is_one_everywhere(deployment: Document) -> None:
    one = container(deployment)
    (port,) = one["ports"]
    assert str(port["containerPort"]) == one["args"][one["args"].index("--port") + 1] == image_of(deployment).one("EXPOSE")
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    assert [probe["httpGet"]["port"] for probe in probes(deployment).values()] == [port["name"]] * 3
    assert documents(BASE / "service.yaml")[0]["spec"]["ports"][0]["targetPort"] == port["name"]


def test_each_overlay_takes_the_image_of_its_device_and_the_gpu_is_asked_for_where_it_is_needed() -> None:
    assert {name: container(one)["image"] for name, one in DEPLOYMENTS.items()} == {"cpu": "pagedcore:cpu", "cuda": "pagedcore:cuda"}
    gpus = {name: container(one)["resources"]["limits"].get("nvidia.com/gpu") for name, one in DEPLOYMENTS.items()}
    assert gpus == {"cpu": None, "cuda": "1"}
    assert pod(DEPLOYMENTS["cuda"])["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for one in DEPLOYMENTS.values():
        resources = container(one)["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"])
        assert "memory" in resources["limits"]
    assert container(DEPLOYMENTS["cpu"])["resources"]["limits"]["cpu"] == "4", "by which the engine counts its threads"


# ---- probes and the end


def probes(deployment: Document) -> dict[str, Document]:
    return {name: container(deployment)[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}


def statuses(*paths: str) -> dict[str, int]:
    client = TestClient(build_app(FakeClient()))
    return {path: client.get(path).status_code for path in paths}


@of_each_deployment
def test_probes_ask_the_right_question_of_a_route_that_exists(deployment: Document) -> None:
    asked = {name: probe["httpGet"]["path"] for name, probe in probes(deployment).items()}
    assert asked == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    scraped = deployment["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"]
    assert statuses("/ready", "/health", scraped) == {"/ready": 200, "/health": 200, "/metrics": 200}


@of_each_deployment
def test_a_model_has_as_long_to_load_as_the_images_health_check_gives(deployment: Document) -> None:
    startup = probes(deployment)["startupProbe"]
    (minutes,) = re.findall(r"--start-period=(\d+)m", image_of(deployment).one("HEALTHCHECK"))
    assert startup["periodSeconds"] * startup["failureThreshold"] == int(minutes) * 60


@of_each_deployment
def test_the_grace_period_holds_all_that_happens_at_sigterm(deployment: Document) -> None:
    from pagedcore_adapters._litserve_server import STOP_TIMEOUT_S
    from pagedcore_adapters.litserve_api import build_server

    drain_timeout_s = inspect.signature(build_server).parameters["drain_timeout_s"].default
    before_sigterm_s = container(deployment)["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed_s = before_sigterm_s + drain_timeout_s + 2 * STOP_TIMEOUT_S
    assert before_sigterm_s > 0
    assert needed_s <= pod(deployment)["terminationGracePeriodSeconds"] <= needed_s + 30


# ---- what it may do, and where it writes


@of_each_deployment
def test_it_runs_as_the_images_user_without_rights(deployment: Document) -> None:
    user, _, group = image_of(deployment).one("USER").partition(":")
    security = pod(deployment)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (int(user), int(group), int(group))
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(deployment)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(deployment)["automountServiceAccountToken"] is False


@of_each_deployment
def test_every_folder_that_is_written_to_is_mounted(deployment: Document) -> None:
    one, image = container(deployment), image_of(deployment)
    mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(deployment)["volumes"]}
    assert set(mounts) == {image.one("VOLUME"), "/tmp", "/dev/shm"}
    assert set(mounts.values()) == set(volumes)
    assert "persistentVolumeClaim" in volumes[mounts[image.one("VOLUME")]]
    assert all("sizeLimit" in volumes[mounts[path]]["emptyDir"] for path in ("/tmp", "/dev/shm"))
    variables = dict(re.findall(r"(\w+)=(/\S+)", " ".join(image.all("ENV")))) | {env["name"]: env.get("value", "") for env in one["env"]}
    folders = [variables[name] for name in ("PAGEDCORE_CACHE", "HF_HOME", "TRITON_CACHE_DIR") if name in variables]
    assert len(folders) == 3
    assert all(any(folder == path or folder.startswith(f"{path}/") for path in mounts) for folder in folders)
    assert variables["TRITON_CACHE_DIR"].startswith("/tmp/"), "not on the volume that pods share"


@of_each_deployment
def test_the_key_comes_from_a_secret_that_may_be_absent(deployment: Document) -> None:
    from pagedcore_adapters._environment import API_KEY

    (key,) = [env for env in container(deployment)["env"] if "valueFrom" in env]
    assert key["name"] == API_KEY
    assert key["valueFrom"]["secretKeyRef"]["optional"] is True


# ---- scaling


def adapter_rules() -> dict[str, Document]:
    """The rules of prometheus-adapter by the name under which the cluster knows the metric."""
    return {rule["name"]["as"]: rule for rule in read_yaml(K8S / "prometheus-adapter.yaml")["rules"]["custom"]}


def test_it_scales_on_the_queue_and_the_kv_pool_by_metrics_that_exist() -> None:
    (autoscaler,) = documents(BASE / "hpa.yaml")
    asked = [metric["pods"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]]
    assert asked == ["pagedcore_waiting_requests", "pagedcore_kv_cache_usage_ratio"]
    assert asked == list(adapter_rules())
    for name, rule in adapter_rules().items():
        (family,) = re.findall(r"^(\w+)\{", rule["seriesQuery"])
        assert family == name
        assert FAMILIES[family].kind == "gauge"


def test_the_rules_sum_a_pods_waiting_requests_and_take_its_fullest_pool() -> None:
    queries = {name: rule["metricsQuery"] for name, rule in adapter_rules().items()}
    assert queries["pagedcore_waiting_requests"].startswith("sum(")
    assert queries["pagedcore_kv_cache_usage_ratio"].startswith("max(")
    for rule in adapter_rules().values():
        assert all(part in rule["metricsQuery"] for part in ("<<.Series>>", "<<.LabelMatchers>>", "by (<<.GroupBy>>)"))
        assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
