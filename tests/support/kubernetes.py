"""The manifests of deploy/k8s as tests read them, and what `kustomize build` makes of them as far as they use it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from support.deployed import DEPLOY, read_yaml

K8S = DEPLOY / "k8s"
BASE = K8S / "base"
OVERLAYS = {path.name: path for path in sorted((K8S / "overlays").iterdir())}
UNDERSTOOD = {"apiVersion", "kind", "resources", "images", "patches"}
"""Fields of a kustomization that `build` applies."""

Document = dict[str, Any]


def kustomization(folder: Path) -> Document:
    return dict(read_yaml(folder / "kustomization.yaml"))


def build(folder: Path) -> dict[str, Document]:
    """Kind -> resource, with images and patches applied."""
    asked = kustomization(folder)
    assert set(asked) <= UNDERSTOOD, f"{folder.name}: {set(asked) - UNDERSTOOD}"
    built: dict[str, Document] = {}
    for name in asked["resources"]:
        path = folder / name
        found = build(path.resolve()) if path.is_dir() else {document["kind"]: document for document in documents(path)}
        built.update(found)
    for patch in asked.get("patches", []):
        for document in documents(folder / patch["path"]):
            built[document["kind"]] = merged(built[document["kind"]], document)
    for image in asked.get("images", []):
        for one in containers(built["Deployment"]):
            if one["image"].partition(":")[0] == image["name"]:
                one["image"] = f"{image['name']}:{image['newTag']}"
    return built


def documents(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def merged(base: Document, patch: Mapping[str, Any]) -> Document:
    """A strategic merge: mappings by key, lists of named things by name, other lists replaced."""
    result = copy.deepcopy(base)
    for key, value in patch.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            result[key] = merged(old, value)
        elif isinstance(old, list) and all(isinstance(item, dict) and "name" in item for item in [*old, *value]):
            changes = {item["name"]: item for item in value}
            result[key] = [merged(item, changes.pop(item["name"], {})) for item in old] + list(changes.values())
        else:
            result[key] = copy.deepcopy(value)
    return result


def pod(deployment: Document) -> Document:
    return dict(deployment["spec"]["template"]["spec"])


def containers(deployment: Document) -> list[Document]:
    return list(deployment["spec"]["template"]["spec"]["containers"])
