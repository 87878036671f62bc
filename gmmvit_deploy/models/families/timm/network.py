"""Build the network of a spec with timm.

Nothing is downloaded: names and arguments with which timm would read files or download files are refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import MissingDependencyError, SpecError
from gmmvit_deploy.models.families.timm.spec import CONV_STEM_VIT, TimmSpec

if TYPE_CHECKING:
    from torch import nn


_PREFIX = "timm:"
_REFUSED = {
    "cache_dir": "it names a folder for downloads",
    "checkpoint_path": "the weights come from the checkpoint",
    "exportable": "gmmvit export itself makes the attention exportable",
    "features_only": "the result would be features, not logits",
    "no_jit": "gmmvit export exports timm's default layers",
    "pretrained": "the weights come from the checkpoint; gmmvit downloads nothing",
    "pretrained_cfg": "it can name files and network addresses",
    "pretrained_cfg_overlay": "it can name files and network addresses",
    "scriptable": "gmmvit export exports timm's default layers",
}
"""Arguments of ``timm.create_model`` that are refused → the reason."""
_OF_TORCHVISION = re.compile(r"vit_[blh]_\d+")


def require_timm() -> Any:
    """Import timm.  Errors: MissingDependencyError when timm is not installed."""
    try:
        import timm
    except ImportError as exc:
        raise MissingDependencyError("timm, which builds this model,", extra="timm") from exc
    return timm


def present_name(text: str) -> str:
    """Return timm's present name, with a tag if any, for a name that timm may have changed.

    ``vit_tiny_patch16_224_in21k`` → ``vit_tiny_patch16_224.augreg_in21k``, whose tag states another preprocessing than
    that of the plain ``vit_tiny_patch16_224``.
    """
    models = require_timm().models
    architecture, tag = models.split_model_name_tag(text.removeprefix(_PREFIX))
    present, usual_tag = models.split_model_name_tag(models.get_deprecated_models().get(architecture) or architecture)
    return ".".join(filter(None, (present, tag or usual_tag)))


def is_timm_name(text: object) -> bool:
    """Return whether timm is installed and builds an architecture of this name."""
    if not isinstance(text, str) or not text:
        return False
    try:
        return bool(require_timm().models.is_model(text.removeprefix(_PREFIX)))
    except MissingDependencyError:
        return False


def architecture_from(text: str, *, where: str) -> str:
    """Return timm's present name, without a tag, for ``text`` such as ``timm:test_vit`` or ``test_vit.r160_in1k``.

    where: the file or the option that holds ``text``, for messages.
    Errors: SpecError when timm has no such architecture, or when the name would make timm download or read files.
    """
    name = text.removeprefix(_PREFIX)
    if name == CONV_STEM_VIT:
        return name
    source, colon, place = name.partition(":")
    timm = require_timm()
    if colon:
        known = place.removeprefix("timm/")
        raise SpecError(
            f"{where}: {text!r} makes timm read from {source}; gmmvit downloads nothing and reads only files that the "
            "command names",
            hint="keep the file with your weights, and type --model "
            + (known if timm.is_model(known) else f"with the name that config.json of {place} has under architecture"),
        )
    architecture = str(timm.models.split_model_name_tag(present_name(name))[0])
    if not timm.is_model(architecture):
        other = "for a class of yours, type --model FILE.py:CLASS; else " if name[:1].isupper() else ""
        if _OF_TORCHVISION.fullmatch(name):
            other = f"for weights of torchvision, type --model {CONV_STEM_VIT}; else "
        raise SpecError(
            f"{where}: timm {timm.__version__} has no architecture {name!r}",
            hint=f"{other}type --model with a name of timm"
            + (f", such as {', '.join(close)}" if (close := _close_names(architecture.lower())) else "")
            + "; type python -c \"import timm; print(*timm.list_models('*vit*'))\" to list all with vit",
        )
    return architecture


def _close_names(text: str) -> list[str]:
    """Return up to three names of timm that begin with the text, or else that are spelled much like it."""
    listed: list[str] = require_timm().list_models()
    longer = [name for name in listed if name.startswith(text)]
    return longer[:3] or difflib.get_close_matches(text, listed, n=3, cutoff=0.8)


def refuse_arguments(arguments: Mapping[str, Any], *, where: str) -> None:
    """Errors: SpecError when an argument of `_REFUSED`, or ``pretrained_…``, has a true or non-empty value."""
    for name, value in arguments.items():
        if value and _refused(name):
            reason = _REFUSED.get(name, _REFUSED["pretrained"])
            raise SpecError(
                f"{where}: the argument {name} is not supported: {reason}",
                hint=f"remove {name}; for an argument of the file, type --model-args '{{\"{name}\": false}}'",
            )


def without_refused(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drop refused arguments.  After `refuse_arguments`, only false or empty values can be left."""
    return {name: value for name, value in arguments.items() if not _refused(name)}


def _refused(name: str) -> bool:
    return name in _REFUSED or name.startswith("pretrained_")


def network_from_spec(spec: TimmSpec) -> nn.Module:
    """Build the network of a spec with random weights, in evaluation mode, or SpecError."""
    timm = require_timm()
    where = f"timm model {spec.architecture}"
    architecture_from(spec.architecture, where=where)
    refuse_arguments(spec.model_args, where=where)
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in spec.model_args.items()}
    try:
        if spec.architecture == CONV_STEM_VIT:
            from gmmvit_deploy.models.families.timm.conv_stem import conv_stem_vit

            return conv_stem_vit(spec.model_args).eval()
        network: nn.Module = timm.create_model(spec.architecture, pretrained=False, **arguments)
    # The arguments come from a file or from the user, and timm checks few of them.
    except Exception as exc:
        raise SpecError(
            f"{where}: timm cannot build this model from the arguments {dict(spec.model_args)}: "
            f"{type(exc).__name__}: {exc}",
            hint="type --model-args with the arguments that the training code gave to timm.create_model",
        ) from exc
    return network.eval()
