"""Models from timm's modules: the classifiers that timm builds, and torchvision's vision transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from gmmvit_deploy.models.families.family import Family, Network, Windows
from gmmvit_deploy.models.families.timm.checkpoint import DEIT3_FILES, DINOV2_FILES, TIMM_FILES
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.families.timm.torchvision_files import TORCHVISION_FILES

if TYPE_CHECKING:
    from gmmvit_deploy.models.families.timm.model import TimmModel
    from gmmvit_deploy.models.layers.model import Model
    from gmmvit_deploy.models.specs import Interpolation


def _network() -> Network:
    from gmmvit_deploy.models.families.timm import folding
    from gmmvit_deploy.models.families.timm.model import TimmModel

    return Network(
        build=TimmModel,
        folding_passes=(
            folding.join_distilled_heads,
            folding.fuse_batch_norms,
            folding.merge_linear_layer_scale,
            folding.narrow_class_token_block,
        ),
    )


def _blocks(spec: TimmSpec) -> tuple[str, ...]:
    from gmmvit_deploy.models.families.timm.model import block_names

    return block_names(spec)


def _windows(spec: TimmSpec) -> Mapping[str, Windows]:
    from gmmvit_deploy.models.families.timm.model import windows_of

    return windows_of(spec)


def _resized(model: Model, size: tuple[int, int], interpolation: Interpolation | None) -> Model:
    from gmmvit_deploy.models.families.timm.resizing import resized_model

    return resized_model(cast("TimmModel", model), size, interpolation)


def _proof(model: Model) -> None:
    from gmmvit_deploy.models.layers.answered_network import require_equal_logits

    hint = "type --model-args with the global_pool of a classifier, such as token or avg"
    require_equal_logits(cast("TimmModel", model), hint=hint)


TIMM = Family(
    name="timm",
    spec=TimmSpec,
    network=_network,
    sources=(TIMM_FILES, TORCHVISION_FILES, DINOV2_FILES, DEIT3_FILES),
    mask_kinds=("plain", "elm", "decay", "gmm"),
    blocks=_blocks,
    windows=_windows,
    distributions=("timm",),
    proof=_proof,
    resized=_resized,
)
