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

__all__ = ["architecture_from", "network_from_spec", "refuse_arguments", "require_timm", "without_refused"]

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


def require_timm() -> Any:
    """Import timm.  Errors: MissingDependencyError when timm is not installed."""
    try:
        import timm
    except ImportError as exc:
        raise MissingDependencyError("timm, which builds this model,", extra="timm") from exc
    return timm


def architecture_from(text: str, *, where: str) -> str:
    """Return the name of a registered architecture for ``text``, such as ``timm:test_vit`` or ``test_vit.r160_in1k``.

    where: the file or the option that holds ``text``, for messages.
    Errors: SpecError when timm has no such architecture, or when the name would make timm download or read files.
    """
    name = text.removeprefix(_PREFIX)
    if name == CONV_STEM_VIT:
        return name
    source, colon, _ = name.partition(":")
    if colon:
        raise SpecError(
            f"{where}: {text!r} makes timm read from {source}; gmmvit downloads nothing and reads only files that the "
            "command names",
            hint="download the model folder yourself, and give the folder to gmmvit export, or type --model with the "
            "name of the architecture",
        )
    timm = require_timm()
    architecture = str(timm.models.split_model_name_tag(name)[0])
    if not timm.is_model(architecture):
        pattern = re.sub(r"[^a-z0-9]", "*", architecture.lower())
        close = timm.list_models(f"*{pattern}*")[:3] if pattern.strip("*") else []
        close = close or difflib.get_close_matches(architecture.lower(), timm.list_models(), n=3)
        raise SpecError(
            f"{where}: timm {timm.__version__} has no architecture {name!r}",
            hint=f"type --model with a name of timm, such as {', '.join(close or ['vit_tiny_patch16_224'])}",
        )
    return architecture


def refuse_arguments(arguments: Mapping[str, Any], *, where: str) -> None:
    """Check the arguments of ``timm.create_model``.

    Errors: SpecError when a refused argument has a true or non-empty value. `_REFUSED` lists the refused arguments;
    arguments whose names begin with ``pretrained_`` are also refused.
    """
    for name, value in arguments.items():
        if value and _refused(name):
            reason = _REFUSED.get(name, _REFUSED["pretrained"])
            raise SpecError(f"{where}: the argument {name} is not supported: {reason}", hint=f"remove {name}")


def without_refused(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drop refused arguments.  After `refuse_arguments`, only false or empty values can be left."""
    return {name: value for name, value in arguments.items() if not _refused(name)}


def _refused(name: str) -> bool:
    return name in _REFUSED or name.startswith("pretrained_")


def network_from_spec(spec: TimmSpec) -> nn.Module:
    """Build the network of a spec with random weights, in evaluation mode.

    Errors: SpecError when timm has no such architecture or does not take the arguments.
    """
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
