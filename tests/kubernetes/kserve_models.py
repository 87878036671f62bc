"""Run by a Python with the package kserve: build its own models from YAML, and return what they hold as JSON.

Prints a line for each field that a model does not know, then the objects that the models give back.
"""

import json
import re
import sys
from pathlib import Path

import kserve.models
import kubernetes.client.models
import yaml

_PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}


def built(kind, value, path):
    """Build a model or a plain value of the type ``kind``, such as ``list[V1Container]`` or ``dict(str, str)``."""
    if value is None:
        raise SystemExit(f"{path}: no value")
    if match := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        return [built(match[1], part, f"{path}[{number}]") for number, part in enumerate(value)]
    if match := re.fullmatch(r"[dD]ict[\[(]str, (.+)[\])]", kind):
        return {key: built(match[1], part, f"{path}.{key}") for key, part in value.items()}
    if kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]):
            raise SystemExit(f"{path}: expected {kind}, got {value!r}")
        return value
    model = getattr(kserve.models, kind, None) or getattr(kubernetes.client.models, kind, None)
    if model is None:
        raise SystemExit(f"{path}: no model {kind}")
    known = {model.attribute_map[name]: name for name in model.openapi_types}
    if unknown := sorted(set(value) - set(known)):
        raise SystemExit(f"{path}: {kind} does not know {', '.join(unknown)}")
    return model(
        **{known[key]: built(model.openapi_types[known[key]], part, f"{path}.{key}") for key, part in value.items()}
    )


def held(value):
    """Return what a model holds, with the names of YAML."""
    if isinstance(value, list):
        return [held(part) for part in value]
    if isinstance(value, dict):
        return {key: held(part) for key, part in value.items()}
    if hasattr(value, "openapi_types"):
        parts = {value.attribute_map[name]: getattr(value, name) for name in value.openapi_types}
        return {key: held(part) for key, part in parts.items() if part is not None}
    return value


objects = []
for name in sys.argv[1:]:
    item = yaml.safe_load(Path(name).read_text())
    version = item["apiVersion"].rpartition("/")[2].capitalize()
    objects.append(held(built(f"{version}{item['kind']}", item, item["kind"])))
print(json.dumps(objects))
