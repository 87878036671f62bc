"""The features of a backbone: transformers' ``pooler_output``, or the class token of ``last_hidden_state``.

    ViTModel        pooler_output = tanh(W x + b) of the class token x
    Dinov2Model     pooler_output = x
    SwinModel       pooler_output = the mean of all tokens

Where ``pooler_output`` has a linear layer of its own, the folder does not show which vector a user means. Folders of
DINO have no weights of this layer.
"""

from __future__ import annotations

from dataclasses import replace

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.hugging_face.network import network_from_spec
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.shapes import Shapes

__all__ = ["refuse_pool", "with_pool"]

_CHOICE = "type --set pool=cls for the class token of last_hidden_state"


def refuse_pool(architecture: str, where: str, hints: LoadHints) -> None:
    """Errors: CheckpointError when ``--set pool`` is given for a classifier, which determines what it reads."""
    if hints.pool is not None:
        raise CheckpointError(
            f"{where}: --set pool={hints.pool} is for a backbone, and {architecture} has a classifier",
            hint="leave --set pool out",
        )


def with_pool(spec: HuggingFaceSpec, shapes: Shapes, hints: LoadHints) -> HuggingFaceSpec:
    """Return the spec of a backbone with its features.

    Errors: CheckpointError when the user must choose, or when the backbone or its weights do not have the choice.
    SpecError as `network_from_spec`.
    """
    import torch
    from torch import nn

    from gmmvit_deploy.models.families.hugging_face.model import has_class_token

    where, architecture = shapes.source, spec.architecture
    with torch.device("meta"):
        network = network_from_spec(spec)
    pooler = getattr(network, "pooler", None)
    learned = isinstance(pooler, nn.Module) and any(isinstance(module, nn.Linear) for module in pooler.modules())
    stored = any(".pooler." in f".{name}" for name in shapes.tensors)
    more = ", or --set pool=pooler for pooler_output" if stored else ""
    if hints.pool is None and learned:
        computed = "a linear layer of its own computes" if stored else "a linear layer that the weights lack computes"
        raise CheckpointError(
            f"{where}: the features of {architecture} are the class token, or transformers' pooler_output, which "
            f"{computed} from the class token; the folder does not state which",
            hint=f"{_CHOICE}{more}",
        )
    if hints.pool == "mean":
        raise CheckpointError(
            f"{where}: --set pool=mean is not supported for {architecture}; expected cls or pooler",
            hint=f"{_CHOICE}{more}" if has_class_token(network) else "leave --set pool out",
        )
    if hints.pool == "cls" and not has_class_token(network):
        raise CheckpointError(
            f"{where}: --set pool=cls: {architecture} has no class token", hint="leave --set pool out"
        )
    if hints.pool == "pooler" and learned and not stored:
        raise CheckpointError(f"{where}: --set pool=pooler: the weights have no tensor of the pooler", hint=_CHOICE)
    return replace(spec, pool=hints.pool or "")
