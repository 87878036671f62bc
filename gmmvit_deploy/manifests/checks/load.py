"""Read manifests: a folder with a kustomization, with its patches merged; any other folder; or a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.manifests.checks.workload import Objects
from gmmvit_deploy.manifests.yaml_text import parsed_documents, parsed_yaml

__all__ = ["load_objects"]

_KUSTOMIZATION = "kustomization.yaml"
_KNOWN = {"apiVersion", "kind", "resources", "patches"}


def load_objects(path: Path) -> Objects:
    """Read all objects.  Errors: InputError for a missing path, other content, or an unknown kustomization."""
    if path.is_file():
        return _documents(path)
    if (path / _KUSTOMIZATION).is_file():
        return _kustomized(path)
    if (path / "base" / _KUSTOMIZATION).is_file():
        overlay = path / "overlays" / "fill-in"
        return _kustomized(overlay if overlay.is_dir() else path / "base")
    files = sorted(path.glob("*.yaml"))
    if not files:
        raise InputError(
            f"{path}: expected a folder with manifests (*.yaml), got "
            + ("a folder without them" if path.is_dir() else "no such folder"),
            hint="type gmmvit manifests BUNDLE -o FOLDER --image IMAGE --model-uri URI to write manifests",
        )
    return [item for file in files for item in _documents(file)]


def _documents(file: Path) -> list[dict[str, Any]]:
    documents = []
    for document in parsed_documents(_text(file)):
        if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
            raise InputError(f"{file}: expected objects of Kubernetes, each with a kind")
        documents.append(document)
    return documents


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"{file}: cannot be read: {exc}") from exc


def _kustomized(folder: Path) -> list[dict[str, Any]]:
    file = folder / _KUSTOMIZATION
    settings = parsed_yaml(_text(file))
    unknown = sorted(set(settings) - _KNOWN) if isinstance(settings, dict) else ["no mapping"]
    if unknown:
        raise InputError(
            f"{file}: this check reads resources and patches only, got {', '.join(unknown)}",
            hint=f"type kubectl kustomize {folder} > all.yaml, then gmmvit manifests --check all.yaml",
        )
    objects: list[dict[str, Any]] = []
    for name in settings.get("resources", []):
        place = folder / name
        objects += _kustomized(place) if place.is_dir() else _documents(place)
    for patch in settings.get("patches", []):
        if set(patch) != {"path"}:
            raise InputError(f"{file}: this check reads patches of the form path: FILE only, got {patch}")
        for change in _documents(folder / patch["path"]):
            objects = [_merged(item, change) if _same(item, change) else item for item in objects]
    return objects


def _same(item: Mapping[str, Any], change: Mapping[str, Any]) -> bool:
    return bool(item["kind"] == change["kind"] and item["metadata"]["name"] == change["metadata"]["name"])


def _merged(value: Any, change: Any) -> Any:
    """Merge a patch as kustomize does: mappings by key, lists of named objects by name, other lists replaced."""
    if isinstance(value, dict) and isinstance(change, dict):
        merged = {key: _merged(part, change[key]) if key in change else part for key, part in value.items()}
        return {**merged, **{key: part for key, part in change.items() if key not in value}}
    if _are_named(value) and _are_named(change):
        changes = {part["name"]: part for part in change}
        merged_list = [_merged(part, changes.pop(part["name"], {})) for part in value]
        return merged_list + list(changes.values())
    return change


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, dict) and "name" in part for part in value)
