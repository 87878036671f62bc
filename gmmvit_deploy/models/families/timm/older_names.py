"""Names that timm, or the code that timm took an architecture from, used before timm's present names.

    layers.0.downsample → layers.1.downsample, head → head.fc       a Swin of timm before 0.9, or of Microsoft's code

timm's module of an architecture has a function ``checkpoint_filter_fn`` that gives the tensors of such files their
present names. It also resamples tensors of another image size, and drops some tensors; the result of this module does
neither, so that a file is loaded with the values that it holds or is refused.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.families.timm.arguments import arguments_of
from gmmvit_deploy.models.families.timm.network import network_from_spec, require_timm
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.shapes import Shapes
from gmmvit_deploy.models.specs import MaskSpec

if TYPE_CHECKING:
    from torch import Tensor


def with_present_names(shapes: Shapes, hints: LoadHints) -> dict[str, Tensor] | None:
    """Return the tensors of the file under timm's present names, or None if timm's function names no tensor anew.

    A tensor may have another shape than in the file, but has its values. A tensor that timm's function drops or
    computes stays as it is in the file, for the later comparison of all tensors with the network.
    """
    from torch import Tensor

    from gmmvit_deploy.models.layers.shapes_only import shapes_only

    try:
        arguments = arguments_of(shapes, hints)
        with shapes_only():
            network = network_from_spec(
                TimmSpec(
                    architecture=arguments.architecture,
                    model_args={**arguments.model_args, "num_classes": 1},
                    image_size=1,
                    classes=1,
                    mask=MaskSpec(),
                )
            )
    except InputError:
        return None
    entry: Any = require_timm().models.model_entrypoint(arguments.architecture)
    rename = getattr(sys.modules[entry.__module__], "checkpoint_filter_fn", lambda tensors, network: tensors)
    try:
        renamed = dict(rename(dict(shapes.tensors), network))
    # timm's functions expect the files of their architecture, and raise errors of any class for other files.
    except Exception:
        return None
    # A renamed or reshaped tensor shares the memory of the file's tensor; a computed one does not.
    held = {(tensor.data_ptr(), tensor.numel()) for tensor in shapes.tensors.values()}
    same = {
        name: tensor
        for name, tensor in renamed.items()
        if isinstance(tensor, Tensor) and (tensor.data_ptr(), tensor.numel()) in held
    }
    used = {(tensor.data_ptr(), tensor.numel()) for tensor in same.values()}
    left = {name: t for name, t in shapes.tensors.items() if (t.data_ptr(), t.numel()) not in used}
    expected = network.state_dict().keys()
    result = {**left, **same}
    return result if len(expected - result.keys()) < len(expected - shapes.tensors.keys()) else None
