"""Read the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gmmvit_deploy.errors import CheckpointError

__all__ = ["json_object"]

_MAX_BYTES = 2**24


def json_object(path: Path, *, hint: str) -> dict[str, Any]:
    """Read a JSON object.

    hint: what to do if the file is not valid.
    Errors: CheckpointError when the file cannot be read, is too large, or does not hold a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: the file has more than {_MAX_BYTES} bytes", hint=hint)
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: expected JSON: {exc}", hint=hint) from exc
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}", hint=hint)
    return data
