"""Read the file of a linear classifier, and add the classifier's tensors to the tensors of the backbone.

DINO's eval_linear.py    {"state_dict": {"module.linear.weight": …, "module.linear.bias": …}}
DINOv2                   {"weight": …, "bias": …}, also with a prefix such as ``linear.``

A backbone of DINOv2 is recognised by the names of its tensors.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gmmvit_deploy.checkpoints.reading import TensorFile, read_tensors
from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.models.families.timm.checkpoint import HEAD_FILE
from gmmvit_deploy.models.families.timm.dinov2_files import DINOV2_FILES

__all__ = ["with_linear_head"]

_DINO = "linear."
"""The prefix in files of DINO's eval_linear.py, whose features interleave class token and mean of the patches."""


def with_linear_head(file: TensorFile, path: Path) -> TensorFile:
    """Return ``file`` with the tensors of the linear classifier in ``path``, under the prefix `HEAD_FILE`.

    Errors: CheckpointError when the file cannot be read, or does not hold a weight and a bias of a linear layer.
    """
    head = read_tensors(path)
    by_part = {name.rpartition(".")[2]: name for name in head.tensors}
    weight, bias = (head.tensors.get(by_part.get(part, "")) for part in ("weight", "bias"))
    if len(head.tensors) != 2 or weight is None or bias is None or weight.dim() != 2 or bias.dim() != 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in list(head.tensors.items())[:4])
        raise CheckpointError(
            f"{path}: expected the weight (classes, features) and the bias (classes) of a linear layer, got {shapes}",
            hint="give the file that eval_linear.py of DINO writes, or a state dict of torch.nn.Linear",
        )
    added = {f"{HEAD_FILE}.weight": weight, f"{HEAD_FILE}.bias": bias}
    interleaved = by_part["weight"].startswith(_DINO) and not DINOV2_FILES.recognises(file.tensors)
    own = {name: tensor for name, tensor in file.tensors.items() if not name.startswith("head.")}
    replaced = "the backbone's own head, which the linear head of --head replaces"
    dropped = dict.fromkeys(sorted(file.tensors.keys() - own.keys()), replaced)
    return replace(
        file,
        tensors=own | added,
        wrapping=f"{file.wrapping}; linear head {path.name} (SHA-256 {head.sha256})",
        record=replace(file.record, interleaved_head=interleaved),
        left_out={**file.left_out, **dropped},
    )
