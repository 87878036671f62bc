"""The Python files that this process may run, because the user named each file on the command line.

A spec of a user's own class holds the SHA-256 of a file and no code. This process runs a file only if `permit` was
called with a file of the same SHA-256. `permit` is called only for an option that names the file, and never when a
bundle is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.models.families.custom.spec import CustomSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """A Python file that the user named.

    path: the path as the user typed it.  sha256: the SHA-256 of ``source``.
    source: the content of the file. Exactly these bytes are run, so the hash is that of the code that runs.
    """

    path: str
    sha256: str
    source: bytes


_PERMITTED: dict[str, OwnFile] = {}  # SHA-256 → file


def permit(file: OwnFile) -> None:
    """Allow this process to run the file."""
    _PERMITTED[file.sha256] = file


def why_not_permitted(spec: CustomSpec) -> str:
    """Return the reason why this process must not run the file of a spec; empty if the process may run the file."""
    if spec.code_sha256 in _PERMITTED:
        return ""
    return (
        f"the model is the class {spec.class_name} of the file {spec.code_file}, and gmmvit runs a file only if "
        "--model names the file"
    )


def permitted_file(spec: CustomSpec) -> OwnFile:
    """Return the file of a spec.  Errors: InputError when this process must not run the file."""
    if why := why_not_permitted(spec):
        raise InputError(
            f"{why}; expected a file with the SHA-256 {spec.code_sha256}",
            hint=f"add --model {spec.code_file}:{spec.class_name}, with the path of the file",
        )
    return _PERMITTED[spec.code_sha256]
