"""Every error that this package raises on purpose.

    GmmvitError
    ├── InputError               something the user handed in is wrong
    │   ├── SpecError            a model description that cannot be
    │   ├── CheckpointError      a checkpoint file that cannot be loaded, or not safely
    │   ├── BundleError          a bundle that is not whole, or not what it says
    │   ├── RepositoryError      a Triton model repository that cannot be written or served
    │   ├── ImageError           bytes that are not an image we take
    │   └── RunnerUnavailableError  a runner that does not take this precision, or has no kernels of ours here
    ├── FoldError                a folding pass could not prove its end state
    ├── ExportError              an exported graph is not what it must be
    ├── EngineError              an engine was not built, or is not what was required
    ├── OutputError              a result could not be written; nothing of it was left behind
    ├── ServerError              a server did not start, is not there, or failed
    │   └── RequestRejectedError the server is well; it refused what it was sent
    └── MissingDependencyError   an optional package is needed and absent

Each carries a ``hint``, the next thing to do: its own, or the usual one of its class. The command
line prints ``Error: <message>`` and ``hint: <hint>`` and leaves with status 1.
"""

from __future__ import annotations

__all__ = [
    "BundleError",
    "CheckpointError",
    "EngineError",
    "ExportError",
    "FoldError",
    "GmmvitError",
    "ImageError",
    "InputError",
    "MissingDependencyError",
    "OutputError",
    "RepositoryError",
    "RequestRejectedError",
    "RunnerUnavailableError",
    "ServerError",
    "SpecError",
]


class GmmvitError(Exception):
    """Root of the tree.  ``hint`` says what to do next; without one, that of the class serves."""

    usual_hint = "type gmmvit doctor to see what works on this machine"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint or self.usual_hint

    def replace_path(self, old: object, new: object) -> None:
        """Write ``new`` wherever the message or the hint names ``old``."""
        self.args = (str(self).replace(str(old), str(new)), *self.args[1:])
        self.hint = self.hint.replace(str(old), str(new))


class InputError(GmmvitError):
    """Something the user handed in is wrong."""

    usual_hint = "gmmvit --help lists the commands, gmmvit COMMAND --help the options of each"


class SpecError(InputError):
    """A model description that cannot be."""


class CheckpointError(InputError):
    """A checkpoint file that cannot be loaded, or not safely."""

    usual_hint = "use the file that the training code saved, whole and unchanged"


class BundleError(InputError):
    """A bundle that is not whole, or not what it says."""

    usual_hint = "type gmmvit export CHECKPOINT -o BUNDLE --force to write it again"


class RepositoryError(InputError):
    """A Triton model repository that cannot be written or served."""

    usual_hint = "type gmmvit repository BUNDLE to write a repository"


class ImageError(InputError):
    """Bytes that are not an image we take."""

    usual_hint = "JPEG, PNG, WebP and BMP with 8 bits a channel are taken"


class RunnerUnavailableError(InputError):
    """A runner that cannot be had here: its runtime does not take this precision, or our kernels cannot be had.

    Never a runtime that fails on a graph which it should take: that is a BundleError.
    """


class FoldError(GmmvitError):
    """A folding pass could not prove its end state."""

    usual_hint = "nothing was written; type gmmvit inspect CHECKPOINT to see what is odd"


class ExportError(GmmvitError):
    """An exported graph is not what it must be."""

    usual_hint = "nothing was written; type gmmvit doctor to see the installed versions"


class EngineError(GmmvitError):
    """An engine was not built, or is not what was required."""

    usual_hint = "nothing was written; --log FILE keeps the output of the builder"


class OutputError(GmmvitError):
    """A result could not be written; nothing of it was left behind."""

    usual_hint = "choose another place with -o, or make room"


class ServerError(GmmvitError):
    """A server did not start, is not there, or failed."""


class RequestRejectedError(ServerError):
    """The server is well; it refused what it was sent."""

    usual_hint = "send what the model states: GET /v2/models/MODEL on the HTTP port shows it"


class MissingDependencyError(GmmvitError):
    """An optional package is needed and absent."""

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"{package} is not installed",
            hint=f"pip install 'gmmvit-deploy[{extra}]'",
        )
