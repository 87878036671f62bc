"""Models that Hugging Face transformers builds: its classifiers of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gmmvit_deploy.models.families.family import Family, Network
from gmmvit_deploy.models.families.hugging_face.checkpoint import HUGGING_FACE_FILES
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec

if TYPE_CHECKING:
    from gmmvit_deploy.models.layers.model import Model


def _network() -> Network:
    from gmmvit_deploy.models.families.hugging_face import folding
    from gmmvit_deploy.models.families.hugging_face.model import HuggingFaceModel
    from gmmvit_deploy.models.families.hugging_face.towers import without_normalised_embeddings

    return Network(
        build=HuggingFaceModel,
        folding_passes=(
            folding.merge_layer_scales,
            folding.store_positions,
            folding.pool_by_mean,
            folding.reverse_channels,
        ),
        mistakes=(("the image embedding not normalised", without_normalised_embeddings),),
    )


def _blocks(spec: HuggingFaceSpec) -> tuple[str, ...]:
    import torch

    from gmmvit_deploy.models.families.hugging_face.model import HuggingFaceModel
    from gmmvit_deploy.models.layers.answered_network import answered_blocks

    with torch.device("meta"):
        return answered_blocks(HuggingFaceModel(spec))


def _proof(model: Model) -> None:
    from gmmvit_deploy.models.families.hugging_face.model import HuggingFaceModel
    from gmmvit_deploy.models.layers.answered_network import require_equal_logits

    hint = "give a folder whose id2label has a label for each class"
    if not model.spec.classes:
        hint = "give the folder of a classifier: the features of this backbone are not a vector"
    require_equal_logits(cast("HuggingFaceModel", model), hint=hint)


HUGGING_FACE = Family(
    name="hugging_face",
    spec=HuggingFaceSpec,
    network=_network,
    sources=(HUGGING_FACE_FILES,),
    mask_kinds=("plain",),
    blocks=_blocks,
    distributions=("transformers",),
    proof=_proof,
    default_resize=None,
)
