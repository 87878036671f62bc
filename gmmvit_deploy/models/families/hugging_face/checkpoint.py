"""Folders that transformers' ``save_pretrained`` writes: how the spec is inferred, and the names of the tensors.

    config.json                 architectures, model_type, the sizes of the network, id2label
    preprocessor_config.json    the preprocessing (`families.hugging_face.images`)

transformers builds the network from ``config.json``. `checkpoints._model_folder` gives the tensors of the file
the names of the network, before the tensors are compared with the network.

The features of a backbone are transformers' ``pooler_output``, or the class token of ``last_hidden_state``:

    ViTModel        pooler_output = tanh(W x + b) of the class token x
    Dinov2Model     pooler_output = x
    SwinModel       pooler_output = the mean of all tokens

Where ``pooler_output`` has a linear layer of its own, the folder does not show which vector a user means. Folders of
DINO have no weights of this layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from gmmvit_deploy.errors import CheckpointError
from gmmvit_deploy.inference.labels import Task
from gmmvit_deploy.models.families.hugging_face.images import PREPROCESSOR_FILE, Preprocessing, preprocessing_from
from gmmvit_deploy.models.families.hugging_face.network import (
    IMAGES_AND_TEXTS,
    backbone_from_spec,
    config_of,
    is_backbone,
    network_config,
)
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.record import KnownImages
from gmmvit_deploy.models.sources.shapes import MAX_SIDE, Shapes, image_sides, refuse_depth
from gmmvit_deploy.models.sources.source import HEAD_FILE, CheckpointSource, TensorOrigins
from gmmvit_deploy.models.specs import CHANNELS, MaskSpec, input_shape

CONFIG_FILE = "config.json"
_TASKS: dict[str, Task] = {
    "single_label_classification": "single-label",
    "multi_label_classification": "multi-label",
}
"""``problem_type`` of ``config.json`` → task."""
_LOSSES: dict[str, tuple[str, Task]] = {
    "CLIPModel": ("softmax", "single-label"),
    "SiglipModel": ("sigmoid", "multi-label"),
}
"""Class of a network of images and texts → what its training applies to the logits, and the task."""
_FIELDS = {"mean": "image_mean", "std": "image_std", "resize": "resample", "crop_pct": "size"}
"""Field of `KnownImages` → name of the value in the preprocessor's file."""


def infer_spec(shapes: Shapes, hints: LoadHints) -> HuggingFaceSpec:
    where = f"{shapes.source}/{CONFIG_FILE}"
    stated = shapes.record.config
    if not stated:
        raise CheckpointError(
            f"{shapes.source}: the names of the tensors are those of Hugging Face transformers, whose weights need the "
            f"{CONFIG_FILE} of their folder",
            hint=f"give the folder with the weights, {CONFIG_FILE} and {PREPROCESSOR_FILE}",
        )
    architecture = _architecture(stated, where)
    if architecture in IMAGES_AND_TEXTS and not (hints.prompts or hints.only_features or hints.head):
        raise CheckpointError(
            f"{where}: {architecture} is a network of images and texts, which has no classes of its own",
            hint="type gmmvit export with --labels FILE and --prompt 'a photo of a {}' to make classes of the labels, "
            "or with --outputs features for the embeddings of images",
        )
    _task(stated, where)
    _refuse_options(shapes.source, hints)
    sizes = {**_part_of_images(stated), **stated}
    depths = {name: sizes.get(name) for name in ("num_hidden_layers", "depths")}
    refuse_depth(shapes, depths, where=where, hint=f"copy or download {CONFIG_FILE} and the weights again")
    config = config_of(architecture, stated, where=where)
    channels = _of_images(config, "num_channels") or 3
    if channels not in CHANNELS:
        raise CheckpointError(
            f"{where}: num_channels is {channels!r}; expected one of {', '.join(map(str, CHANNELS))}",
            hint=f"give the folder of a classifier of images, and {CONFIG_FILE} unchanged",
        )
    backbone = is_backbone(architecture) or (architecture in IMAGES_AND_TEXTS and not hints.prompts)
    if backbone and not hints.only_features and hints.head is None:
        raise CheckpointError(
            f"{where}: {architecture} is a backbone without a classifier",
            hint="add --outputs features to gmmvit export; for logits, add --head FILE with a linear layer that was "
            "trained on the features, or give the folder of a classifier, such as ViTForImageClassification",
        )
    if not backbone and hints.head is not None:
        raise CheckpointError(
            f"{where}: --head is for a backbone, and {architecture} has a classifier", hint="leave --head out"
        )
    if not backbone and hints.pool is not None:
        raise CheckpointError(
            f"{where}: --set pool={hints.pool} is for a backbone, and {architecture} has a classifier",
            hint="leave --set pool out",
        )
    preprocessing = _preprocessing(shapes, channels, hints)
    height, width = _size(preprocessing, config, hints, shapes.source)
    shapes.taken_from["image_size"] = _size_from(shapes, architecture, preprocessing)
    if hints.prompts:
        texts = ", ".join(map(repr, hints.prompts))
        shapes.taken_from["classes"] = f"the text tower, run once in float64 with the prompts {texts}"
    classes, features = 0 if backbone else len(hints.labels) or int(config.num_labels), 0
    if hints.head is not None:
        classes, features = shapes.of(f"{HEAD_FILE}.weight", rank=2)
    spec = HuggingFaceSpec(
        architecture=architecture,
        config=network_config(stated, where=where),
        image_size=height,
        image_width=None if width == height else width,
        channels=channels,
        classes=classes,
        head_features=features,
        mask=MaskSpec(),
        prompts=hints.prompts,
        bgr=preprocessing is not None and preprocessing.bgr,
    )
    if hints.heads not in (None, spec.first_heads):
        raise CheckpointError(
            f"{shapes.source}: --set heads={hints.heads}, but {CONFIG_FILE} states {spec.first_heads} heads",
            hint="leave --set heads out",
        )
    if not backbone:
        return spec
    spec = _with_pool(spec, shapes, hints)
    _require_width(spec, shapes.source, hints)
    return spec


def _require_width(spec: HuggingFaceSpec, source: str, hints: LoadHints) -> None:
    """Errors: CheckpointError when the linear layer of ``--head`` reads another number of features."""
    import torch

    from gmmvit_deploy.models.families.hugging_face.towers import pooled

    if not spec.head_features:
        return
    try:
        with torch.device("meta"):
            backbone = backbone_from_spec(spec)
            (width,) = pooled(backbone, backbone(torch.zeros(1, *input_shape(spec))), spec).shape[1:]
    # A network that cannot run without data, or has no vector of features, is refused when the model is filled.
    except Exception:
        return
    if spec.head_features != width:
        raise CheckpointError(
            f"{hints.head}: the linear head reads {spec.head_features} features, but {source} has {width}",
            hint="type --head with the file of a linear layer that was trained on the features of this backbone",
        )


def _architecture(stated: Mapping[str, Any], where: str) -> str:
    names = stated.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"{where}: architectures is {names!r}; expected a list with the class of the model",
            hint='add the class of training, such as "architectures": ["ViTForImageClassification"]',
        )
    return names[0]


def _task(stated: Mapping[str, Any], where: str) -> Task | None:
    value = stated.get("problem_type")
    if value is not None and value not in _TASKS:
        raise CheckpointError(
            f"{where}: problem_type is {value!r}; expected {' or '.join(_TASKS)}",
            hint=f"give the folder of a classifier, or correct problem_type in {CONFIG_FILE}",
        )
    return None if value is None else _TASKS[value]


def _refuse_options(source: str, hints: LoadHints) -> None:
    """Refuse an option that describes what ``config.json`` states."""
    options = {"--model": hints.model, "--set closed_form": hints.closed_form}
    for option, value in options.items():
        if value is not None:
            raise CheckpointError(
                f"{source}: {option} does not apply to a folder of Hugging Face transformers, whose {CONFIG_FILE} "
                "states the architecture",
                hint=f"leave {option} out",
            )


def _part_of_images(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``vision_config``, in which a network of images and texts, such as CLIP, has the sizes; else nothing."""
    part = stated.get("vision_config")
    return dict(part) if isinstance(part, Mapping) else {}


def _of_images(config: Any, name: str) -> Any:
    """Return a value of the configuration, or of its ``vision_config``; None if neither has it."""
    own = getattr(config, name, None)
    return getattr(getattr(config, "vision_config", None), name, None) if own is None else own


def _preprocessing(shapes: Shapes, channels: int, hints: LoadHints) -> Preprocessing | None:
    """Return what the file of the image processor states; None without file, and if tensors are prepared otherwise."""
    model_type = str(shapes.record.config.get("model_type", ""))
    where = f"{shapes.source}/{_file(shapes)}"
    try:
        stated = preprocessing_from(shapes.record.preprocessor, where=where, model_type=model_type, channels=channels)
    except CheckpointError:
        if hints.only_tensors:
            return None
        raise
    return None if stated is not None and stated.bgr and hints.only_tensors else stated


def _file(shapes: Shapes) -> str:
    return shapes.record.preprocessor_file or PREPROCESSOR_FILE


def _size(preprocessing: Preprocessing | None, config: Any, hints: LoadHints, source: str) -> tuple[int, int]:
    """Return (height, width) of the network's input: after the preprocessing, else as ``config.json`` states."""
    stated = preprocessing.size if preprocessing is not None else None
    size = stated or _of_images(config, "image_size") or hints.image_size
    sides = image_sides(size)
    if sides is None:
        raise CheckpointError(
            f"{source}: the size of the images is {size!r}; expected the height and the width, each from 1 to "
            f"{MAX_SIDE} pixels",
            hint=f"correct image_size in {CONFIG_FILE} or size in {PREPROCESSOR_FILE}; if neither file states a size, "
            "type --image-size",
        )
    return sides


def _size_from(shapes: Shapes, architecture: str, preprocessing: Preprocessing | None) -> str:
    """Return where the size of the images comes from."""
    if preprocessing is not None and preprocessing.size is not None:
        return _file(shapes)
    config = shapes.record.config
    stated = any(part.get("image_size") is not None for part in (config, _part_of_images(config)))
    return CONFIG_FILE if stated else f"transformers' default for {architecture}"


def tensor_origins(spec: HuggingFaceSpec, names: Iterable[str]) -> TensorOrigins:
    if not spec.head_features:
        return {name: name.removeprefix("network.") for name in names}
    head = "network.classifier."
    return {name: name.replace(head, f"{HEAD_FILE}.").removeprefix("network.backbone.") for name in names}


def known_unused(spec: HuggingFaceSpec) -> Mapping[str, str]:
    reason = "--set pool=cls takes the class token before the pooler"
    return {r"(.+\.)?pooler\..+": reason} if spec.pool == "cls" else {}


def known_images(shapes: Shapes, hints: LoadHints, spec: HuggingFaceSpec) -> KnownImages:
    config, where = shapes.record.config, f"{shapes.source}/{CONFIG_FILE}"
    if spec.prompts:
        function, task = _LOSSES[spec.architecture]
        evidence = f"{where}: {spec.architecture} is trained with the {function}"
        origins = {"labels": "--labels"}
        stated = KnownImages(labels=hints.labels, task=task, task_evidence=evidence, origins=origins)
    elif spec.head_features:  # id2label is that of another classifier, or transformers' default
        stated = KnownImages()
    else:
        stated = KnownImages(
            labels=_labels(config, where, spec.classes),
            task=_task(config, where),
            task_evidence=f"{where}: problem_type is {config.get('problem_type')!r}",
            origins={"labels": f"id2label in {CONFIG_FILE}"},
        )
    preprocessing = _preprocessing(shapes, spec.channels, hints)
    if preprocessing is None:
        return stated
    in_file = shapes.record.preprocessor or {}
    default = f"transformers' default, as {_file(shapes)} does not state it"
    origins = {name: _file(shapes) if field in in_file else default for name, field in _FIELDS.items()}
    return replace(
        stated,
        mean=preprocessing.mean,
        std=preprocessing.std,
        resize=preprocessing.resize,
        crop_pct=preprocessing.crop_pct if preprocessing.resize is not None else None,
        origins={**stated.origins, **origins},
    )


def _labels(stated: Mapping[str, Any], where: str, classes: int) -> tuple[str, ...] | None:
    """Return ``id2label`` in the order of the index; None if the labels are those that transformers makes up."""
    labels = stated.get("id2label")
    if labels is None:
        return None
    held = [labels.get(str(index)) for index in range(classes)] if isinstance(labels, Mapping) else []
    names = [name for name in held if isinstance(name, str)]
    if len(names) != classes:
        raise CheckpointError(
            f"{where}: id2label: expected a label for each index from 0 to {classes - 1}, got {labels!r:.200}",
            hint=f"correct id2label in {CONFIG_FILE}",
        )
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        return None
    return tuple(names)


HUGGING_FACE_FILES = CheckpointSource(
    name="Hugging Face transformers",
    signature=(r"\w+\.(encoder\.)?(layer|layers)\.\d+\.(.+\.)?attention\.(.+\.)?(query|q_proj)\.weight",),
    spec=infer_spec,
    tensors=tensor_origins,
    known_unused=known_unused,
    images=known_images,
    own_hints=("pool",),
)


_CHOICE = "type --set pool=cls for the class token of last_hidden_state"


def _with_pool(spec: HuggingFaceSpec, shapes: Shapes, hints: LoadHints) -> HuggingFaceSpec:
    """Return the spec of a backbone with its features, if the folder shows them or the user's choice is possible."""
    import torch
    from torch import nn

    from gmmvit_deploy.models.families.hugging_face.towers import has_class_token

    where, architecture = shapes.source, spec.architecture
    with torch.device("meta"):
        network = backbone_from_spec(spec)
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
