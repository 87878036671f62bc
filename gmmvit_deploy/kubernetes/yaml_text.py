"""Write and read YAML with PyYAML."""

from __future__ import annotations

from typing import Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.extras import require

__all__ = ["parsed_yaml", "yaml_text"]


def _yaml() -> Any:
    return require("yaml", package="pyyaml", extra="kubernetes")


def yaml_text(data: Any, *comments: str) -> str:
    """Return the YAML of plain dicts and lists, in their order, without anchors.  comments: lines above it."""
    yaml = _yaml()

    class Plain(yaml.SafeDumper):  # type: ignore[misc, name-defined]  # a class of a module that is imported late
        def ignore_aliases(self, data: Any) -> bool:
            return True

    text = yaml.dump(data, Dumper=Plain, sort_keys=False, width=120, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comments) + str(text)


def parsed_yaml(text: str) -> Any:
    """Read a single document.  Errors: InputError when the text is not YAML."""
    yaml = _yaml()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise InputError(f"expected YAML: {exc}") from exc
