"""Models of a user's own class: ``--model FILE.py:CLASS`` names the code, which is no part of this package.

A spec holds the SHA-256 of a file and no code. This process runs a file only if `permit` was called with a file of the
same SHA-256: for an option that names the file, and never when a bundle is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.families.family import Family, Network
from gmmvit_deploy.models.specs import ModelSpec, require


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomSpec(ModelSpec):
    """The file, without folders, the class and its arguments, as JSON values, that a user named at export."""

    family: ClassVar[str] = "custom"
    code_file: str
    code_sha256: str
    class_name: str
    model_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def description(self) -> str:
        return f"{self.class_name} of {self.code_file}"

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require(self.mask.kind == "plain", "a model of a user's own class has no mask that this project knows")
        texts = (self.code_file, self.code_sha256, self.class_name)
        require(
            all(isinstance(text, str) and text for text in texts)
            and re.fullmatch("[0-9a-f]{64}", self.code_sha256) is not None,
            f"expected names in code_file and class_name, and a SHA-256 in hexadecimal in code_sha256, got {texts!r}",
        )
        require(
            isinstance(self.model_args, Mapping) and all(isinstance(name, str) for name in self.model_args),
            f"model_args: expected the arguments of {self.class_name} by name, got {self.model_args!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """A Python file that the user named, by the path as typed, and its content: exactly the bytes that are run.

    package: the dotted name of the package that the file lies in, for relative imports; "" for a file on its own.
    """

    path: str
    sha256: str
    source: bytes
    package: str = ""


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


def _network() -> Network:
    from gmmvit_deploy.models.families.custom.model import build

    return Network(build=build)


CUSTOM = Family(
    name="custom",
    spec=CustomSpec,
    network=_network,
    sources=(),
    mask_kinds=("plain",),
    blocks=lambda spec: (),
    unavailable=why_not_permitted,
)
