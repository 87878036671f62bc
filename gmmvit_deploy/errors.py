"""The classes of all errors that this package raises on purpose.

    GmmvitError
    ├── InputError               a file, value or option from the user is invalid
    │   ├── SpecError            a model spec is invalid
    │   ├── CheckpointError      a checkpoint file cannot be loaded, or not safely
    │   ├── BundleError          a bundle is incomplete, or contradicts its manifest
    │   ├── RepositoryError      a Triton model repository cannot be written or served
    │   ├── ImageError           bytes are not an image in a supported format
    │   └── RunnerUnavailableError  a runner does not support the precision, or its CPU kernels are not available
    ├── FoldError                a folding pass could not prove its end state
    ├── ExportError              an exported graph failed a check
    ├── EngineError              an engine was not built, or does not meet the requirements
    ├── OutputError              a result could not be written; no partial output remains
    ├── ServerError              a server did not start, is not reachable, or failed
    │   ├── RequestRejectedError the server works, but refused the request as invalid or too large
    │   ├── OverloadError        the server answers, but refuses requests until it has capacity
    │   ├── KeyRefusedError      the server requires a key, or refuses the client's key
    │   └── NotOfferedError      the server or its gateway does not offer the kind of request
    └── MissingDependencyError   an optional package is required and not installed

Each error has a ``hint`` with the next step for the user. An error that is raised without a hint has the default hint
of the error's class. The command line prints ``Error: <message>`` and ``hint: <hint>``, then exits with status 1.
"""

from __future__ import annotations

import re

READABLE_HINT = "give a file that this user may read, on a disk that works"
"""The hint of an error about a file that the operating system does not let this process read."""
_COMMAND_OR_OPTION = re.compile(
    r"\b(?:gmmvit|hf|ray|curl|pip|python) [a-z-][^;]*|type (?=-)|--dataset NAME, or |--set (?=\w)|--[a-z-]+|(?<!\S)-o\b"
)
_ARGUMENTS = {
    "type ": "give ",
    "--dataset NAME, or ": "",
    "--set ": "",
    "--force": "force=True",
    "--for": "goal",
    "--from": "source",
    "--input": "input_kind",
    "--output": "out",
    "-o": "out",
    "--precision": "precisions",
    "--to": "folder",
}
"""Option → argument of Python, where it is not the same word."""


def _as_arguments(hint: str) -> str:
    """Name arguments of Python in place of options, but in commands: ``add --max-batch 8`` → ``add max_batch 8``."""

    def argument(match: re.Match[str]) -> str:
        text = match[0]
        return _ARGUMENTS.get(text, text.removeprefix("--").replace("-", "_") if text.startswith("--") else text)

    return _COMMAND_OR_OPTION.sub(argument, hint)


class GmmvitError(Exception):
    """Base class of all errors.

    hint: the next step for the user; by default, ``default_hint`` of the class.
    errors: those of which the message is a list; empty for a single error.
    """

    default_hint = "type gmmvit doctor to see which parts work on this machine"
    errors: tuple[GmmvitError, ...] = ()

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint or self.default_hint
        if hint:
            self.add_note(f"hint: {_as_arguments(hint)}")  # only a traceback of Python shows it

    def replace_path(self, old: object, new: object) -> None:
        """Replace ``old`` by ``new`` in the message and in the hint."""
        self.args = (str(self).replace(str(old), str(new)), *self.args[1:])
        self.hint = self.hint.replace(str(old), str(new))


class InputError(GmmvitError):
    """A file, value or option from the user is invalid."""

    default_hint = "type gmmvit --help to list the commands, or gmmvit COMMAND --help to list the options of a command"


class SpecError(InputError):
    """A model spec is invalid."""


class CheckpointError(InputError):
    """A checkpoint file cannot be loaded, or not safely."""

    default_hint = "use the complete and unchanged file that the training code saved"


class BundleError(InputError):
    """A bundle is incomplete, or contradicts its manifest."""

    default_hint = "type gmmvit export CHECKPOINT -o BUNDLE --force to write the bundle again"


class RepositoryError(InputError):
    """A Triton model repository cannot be written or served."""

    default_hint = "type gmmvit repository BUNDLE to write a repository"


class ImageError(InputError):
    """Bytes are not an image in a supported format."""

    default_hint = "use a file that this user may read, with a JPEG, PNG, WebP or BMP image of 8 bits per channel"


class RunnerUnavailableError(InputError):
    """A runner is not available: its runtime does not support the precision, or its CPU kernels cannot be loaded.

    If a runtime supports the precision but fails on a graph, the error is BundleError instead.
    """


class FoldError(GmmvitError):
    """A folding pass could not prove its end state."""

    default_hint = "no file was written; type gmmvit inspect CHECKPOINT to see unusual values of the checkpoint"


class ExportError(GmmvitError):
    """An exported graph failed a check."""

    default_hint = "no file was written; type gmmvit doctor to see the installed versions"


class EngineError(GmmvitError):
    """An engine was not built, or does not meet the requirements."""

    default_hint = "no engine was written; add --log FILE to keep the output of the builder"


class OutputError(GmmvitError):
    """A result could not be written; no partial output remains."""

    default_hint = "type -o with another path, or free space on the disk"


class ServerError(GmmvitError):
    """A server did not start, is not reachable, or failed."""


class RequestRejectedError(ServerError):
    """The server works, but refused the request as invalid or too large."""

    default_hint = "send the inputs that the model expects; GET /v2/models/MODEL on the HTTP port lists the inputs"


class OverloadError(ServerError):
    """The server answers, but refuses requests until it has capacity: it is overloaded, starting or stopping."""

    default_hint = "repeat the request later, or send fewer requests at a time"


class KeyRefusedError(ServerError):
    """The server requires a key, or refuses the client's key."""

    default_hint = "type --key-file FILE with the key that the server's operator gave you, or set GMMVIT_KEY_FILE"


class NotOfferedError(ServerError):
    """The server or its gateway does not offer the kind of request."""

    default_hint = (
        "type --served-name with the name of a model of this server; a gateway offers only the requests of its list"
    )


class MissingDependencyError(GmmvitError):
    """An optional package is required and not installed."""

    def __init__(self, package: str, *, extra: str, hint: str = "") -> None:
        super().__init__(f"{package} is not installed", hint=hint or f"pip install 'gmmvit-deploy[{extra}]'")
