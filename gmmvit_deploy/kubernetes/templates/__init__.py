"""The files to write, as Jinja templates: objects of Kubernetes (``*.yaml.j2``) and Dockerfiles.

A template of objects holds all files of a folder; a line ``--- # PATH`` begins each. Its holes are filled with JSON,
which is YAML too, so that a name such as ``on`` remains a string, and no value adds lines.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["docker_file", "yaml_files"]


def _json(value: Any) -> Markup:
    """Return the JSON of a value, but the text of a macro, and what a template calls safe, as it is."""
    if isinstance(value, Markup):
        return value.rstrip()
    return Markup(json.dumps(value, ensure_ascii=False))  # noqa: S704 - no HTML


_YAML = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=True,  # by it, `_json` recognises the text of macros
    finalize=_json,
)
_DOCKER = _YAML.overlay(autoescape=False, finalize=None)
_FILE = re.compile(r"^--- # (\S+)\n", re.MULTILINE)


def yaml_files(template: str, **values: Any) -> dict[str, str]:
    """Return path → text of the files in a template of objects.  values: for its holes."""
    _, *parts = _FILE.split(_YAML.get_template(template).render(values))
    return {path: f"{text.rstrip()}\n" for path, text in zip(parts[::2], parts[1::2], strict=True)}


def docker_file(template: str, **values: Any) -> str:
    """Return the text of a Dockerfile.  values: for the holes of the template."""
    return _DOCKER.get_template(template).render(values)
