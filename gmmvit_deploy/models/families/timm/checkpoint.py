"""Checkpoints of models that timm builds: how the spec is inferred, and the names of the tensors.

timm builds the model from the name of the architecture and from arguments (`families.timm.arguments`); the tensors
determine the number of classes and of channels. The tensors have timm's names, or names that timm, or the code that
timm took an architecture from, used before, or those of two codes of Meta:

    DeiT III (facebookresearch/deit, models_v2.py)
    blocks.{i}.gamma_1, gamma_2          ls1.gamma, ls2.gamma (LayerScale)

    DINOv2, a backbone without a classifier: the user gives a linear head
    register_tokens (1, R, D)            reg_token
    cls_token, pos_embed (1, n+1, D)     in a model with registers, because timm adds no positions to class token and
                                         registers: cls_token + pos_embed[0] → cls_token,  pos_embed[1:] → pos_embed
    blocks.{i}.mlp.w12, w3               mlp.fc1, mlp.fc2 of the SwiGLU mlp (ViT-g)
    mask_token                           stored, but read only in training

These files do not hold timm's name of the architecture, so the user types this name, such as
``deit3_small_patch16_224``, ``vit_small_patch14_dinov2`` or ``vit_small_patch14_reg4_dinov2``.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import CheckpointError, InputError
from gmmvit_deploy.images.resize_rules import CROP_MODES, RESIZE_RULES
from gmmvit_deploy.models.families.timm.arguments import (
    Arguments,
    arguments_of,
    default_cfg,
    default_origin,
    is_train_script,
    name_of,
)
from gmmvit_deploy.models.families.timm.network import network_from_spec, require_timm
from gmmvit_deploy.models.families.timm.spec import TimmSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.record import KnownImages
from gmmvit_deploy.models.sources.shapes import MissingTensorError, Shapes, infer_mask
from gmmvit_deploy.models.sources.source import HEAD_FILE, CheckpointSource, Conversion, TensorOrigins
from gmmvit_deploy.models.specs import CHANNELS, Interpolation, MaskSpec

if TYPE_CHECKING:
    from torch import Tensor

_FIELDS = {"mean": "mean", "std": "std", "resize": "interpolation", "crop_pct": "crop_pct"}
"""Field of `KnownImages` → name of the value in timm."""
_OPTIONS_OF_DEIT = {"model", "input_size", "distillation_type"}
_OPTIONS_OF_DINO = {"arch", "patch_size", "out_dim"}


def infer_spec(shapes: Shapes, hints: LoadHints) -> TimmSpec:
    arguments = arguments_of(shapes, hints)
    model_args = dict(arguments.model_args)
    height, width = asked_size(shapes, arguments)
    shapes.taken_from["image_size"] = arguments.size_from
    channels = _channels(shapes, hints, arguments)
    if channels != 3 or "in_chans" in model_args:
        model_args["in_chans"] = channels
    classes, model_args["num_classes"] = _classes(shapes, hints, arguments)
    return TimmSpec(
        architecture=arguments.architecture,
        model_args=model_args,
        image_size=height,
        image_width=None if width == height else width,
        channels=channels,
        classes=classes,
        mask=_mask(shapes, hints),
        head_blocks=hints.head_blocks or 0,
        head_average=bool(hints.head_average),
        head_interleaved=bool(hints.head_average) and shapes.record.interleaved_head,
    )


def _mask(shapes: Shapes, hints: LoadHints) -> MaskSpec:
    """Return the mask whose tensors the file holds, under the names of `gmmvit_deploy.timm.add_masks`."""
    parts: dict[str, str] = {}
    paths: list[str] = []
    for name in shapes.tensors:
        if match := re.match(r"(.+\.mask)\.(alpha|sigma|mask|decay)$", name):
            parts.setdefault(match.group(2), match.group(1))
            paths.append(match.group(1))
    if "decay" in parts:
        return MaskSpec(kind="decay")
    if not parts.keys() & {"alpha", "sigma"}:
        return infer_mask(shapes, hints, *(paths or [""]))
    closed = "mask" not in parts
    if hints.closed_form not in (None, closed):
        raise CheckpointError(
            f"{shapes.source}: {hints.typed()['closed_form']}, but the file holds "
            f"{'no' if closed else 'a'} stored base mask",
            hint="leave --set closed_form out: "
            + (
                "without a stored base, masks of gmmvit_deploy.timm have the closed form"
                if closed
                else "the model was trained with the stored base mask that the file holds"
            ),
        )
    # If the stored base mask of some attention is missing, `checkpoints.loading` names the missing tensor.
    complete = [path for path in paths if closed or f"{path}.mask" in shapes]
    return infer_mask(shapes, replace(hints, closed_form=closed), *complete)


def asked_size(shapes: Shapes, arguments: Arguments) -> tuple[int, int]:
    """Return (height, width) of the images.  Errors: CheckpointError when the size is neither stated nor typed."""
    if arguments.size is None:
        raise CheckpointError(
            f"{shapes.source}: neither the file nor the architecture {arguments.architecture} states the size of the "
            "images",
            hint=f"type --image-size with the size of the training images in pixels{_default_size(arguments.cfg)}",
        )
    return arguments.size


def _default_size(cfg: Mapping[str, Any]) -> str:
    size = cfg.get("input_size")
    return f", such as {size[-1]}, if training used timm's default" if isinstance(size, list | tuple) and size else ""


def _channels(shapes: Shapes, hints: LoadHints, arguments: Arguments) -> int:
    first = arguments.cfg.get("first_conv")
    first = first[0] if isinstance(first, list | tuple) and first else first
    weight = shapes.tensors.get(f"{first}.weight")
    # The first convolution of TResNet reads the pixels of 4 × 4 squares as channels, which are more than an image has.
    if weight is not None and weight.dim() == 4 and weight.shape[1] in CHANNELS:
        return int(weight.shape[1])
    stated = arguments.model_args.get("in_chans", hints.channels)
    return 3 if stated is None else int(stated)


def _classes(shapes: Shapes, hints: LoadHints, arguments: Arguments) -> tuple[int, int]:
    """Return (number of classes, argument ``num_classes`` of timm): (0, 0) if only the features are needed."""
    if hints.head is not None:
        return _head_classes(shapes, hints, hints.head), 0
    classifier = arguments.cfg.get("classifier") or "head"
    names = classifier if isinstance(classifier, list | tuple) else (classifier,)
    weight = shapes.tensors.get(f"{names[0]}.weight")
    stated = arguments.model_args.get("num_classes")
    if weight is not None and weight.dim() >= 2:
        typed, classes = hints.model_args.get("num_classes"), int(weight.shape[0])
        if typed is not None and typed != classes:
            raise CheckpointError(
                f"{shapes.source}: --model-args has num_classes {typed}, but {names[0]}.weight has {classes} classes",
                hint="leave num_classes out of --model-args",
            )
        return classes, classes
    if hints.only_features:
        return 0, 0
    if isinstance(stated, int) and stated > 0:
        return stated, stated
    raise MissingTensorError(
        f"{shapes.source}: the file has no classifier: the tensor {names[0]}.weight of {arguments.architecture} is "
        "missing",
        names=tuple(f"{name}.weight" for name in names),
        hint="add --outputs features to gmmvit export for the features of the backbone, add --head FILE and "
        "--set head_blocks=N for a backbone with a linear head, or type --model with the architecture of the "
        "training code",
    )


def _head_classes(shapes: Shapes, hints: LoadHints, head: str) -> int:
    classes, features = shapes.of(f"{HEAD_FILE}.weight", rank=2)
    token = shapes.tensors.get("cls_token")
    if token is not None and token.dim() == 3:
        dim = int(token.shape[-1])
        if features != ((hints.head_blocks or 0) + bool(hints.head_average)) * dim:
            average = " and --set head_average=yes" if hints.head_average else ""
            raise CheckpointError(
                f"{head}: the linear head reads {features} features, but {shapes.source} has "
                f"{((hints.head_blocks or 0) + bool(hints.head_average)) * dim} features with --set "
                f"head_blocks={hints.head_blocks}{average}: {dim} for each token",
                hint=f"type --set head_blocks={features // dim}, or --set head_blocks={features // dim - 1} "
                "--set head_average=yes"
                if features % dim == 0 and features > dim
                else f"type --set head_blocks={features // dim}"
                if features == dim
                else "type --head with the file of the linear head that was trained on this backbone",
            )
    return classes


def tensor_origins(spec: TimmSpec, names: Iterable[str]) -> dict[str, str]:
    return {name: name.removeprefix("network.").replace("linear_head.linear.", f"{HEAD_FILE}.") for name in names}


_COMPUTED = {r".+\.(relative_position_index|attn_mask)": "timm computes this tensor from the sizes of the model"}


def known_interpolation(shapes: Shapes, hints: LoadHints) -> Interpolation | None:
    """Return the algorithm of the code that wrote the file, which the options of its training script show, or None."""
    options = shapes.record.args.keys()
    if shapes.record.config or is_train_script(shapes.record):
        return "timm"
    if options >= _OPTIONS_OF_DEIT:
        return "deit"
    return "dino" if options >= _OPTIONS_OF_DINO else None


def known_images(shapes: Shapes, hints: LoadHints, spec: TimmSpec) -> KnownImages:
    """Return what timm's train.py, which states no labels, or ``config.json`` of a model folder states."""
    record = shapes.record
    if record.config:
        stated = record.config.get("pretrained_cfg")
        config = dict(stated) if isinstance(stated, dict) else dict(record.config)
        known = _from_data_config(shapes.source, spec.channels, _resolved(shapes.source, {}, config), record.config)
        where = "pretrained_cfg in config.json" if isinstance(stated, dict) else "config.json"
        origins = {name: where if config.get(key) else "timm's default" for name, key in _FIELDS.items()}
        return replace(known, origins={**origins, "labels": "config.json"})
    if is_train_script(record):
        args: dict[str, Any] = {k: v for k, v in record.args.items() if k not in ("input_size", "img_size")}
        name = name_of(shapes, hints)[0]
        cfg = default_cfg(name)
        resolved = dict(_resolved(shapes.source, args | {"in_chans": spec.channels}, cfg))
        for field in ("mean", "std"):  # timm's loader averages values of RGB for a model with other channels
            if args.get(field) is None and len(resolved[field]) != spec.channels:
                resolved[field] = (sum(resolved[field]) / len(resolved[field]),) * spec.channels
        origins = {field: f"{key} of args" if args.get(key) else default_origin(name) for field, key in _FIELDS.items()}
        return replace(_from_data_config(shapes.source, spec.channels, resolved, {}), origins=origins)
    return KnownImages(usual=_usual_options(shapes, hints, spec))


def _usual_options(shapes: Shapes, hints: LoadHints, spec: TimmSpec) -> Mapping[str, str]:
    resolved = _resolved(shapes.source, {}, default_cfg(name_of(shapes, hints)[0]))
    rule, crop_pct = f"{resolved['crop_mode']}-{resolved['interpolation']}", resolved["crop_pct"]
    options = {
        name: f"--{name} {','.join(map(str, resolved[name]))}"
        for name in ("mean", "std")
        if len(resolved[name]) == spec.channels
    }
    if rule in RESIZE_RULES and crop_pct <= 1:
        options["resize"] = f"--resize {rule} --crop-pct {crop_pct:g}"
    return options


def _resolved(source: str, args: Mapping[str, Any], cfg: Mapping[str, Any]) -> Mapping[str, Any]:
    resolve: Any = require_timm().data.resolve_data_config
    try:
        resolved: Mapping[str, Any] = resolve(dict(args) or {"": None}, pretrained_cfg=dict(cfg))
    # The settings come from a file, and timm checks them by assertions only.
    except Exception as exc:
        raise CheckpointError(
            f"{source}: timm cannot read the preprocessing that the file states: {type(exc).__name__}: {exc}"
        ) from exc
    return resolved


def _from_data_config(
    source: str, channels: int, resolved: Mapping[str, Any], config: Mapping[str, Any]
) -> KnownImages:
    """Return the preprocessing ``resolved`` as this package describes it.  config: ``config.json``, with the labels."""
    interpolation = resolved["interpolation"]
    # During training, "random" chooses a filter for each image; timm evaluates such models with the bilinear filter.
    name = "bilinear" if interpolation == "random" else interpolation
    for field in ("mean", "std"):
        values = resolved[field]
        if not isinstance(values, list | tuple) or len(values) != channels or not all(map(_is_number, values)):
            raise _not_stated(source, field, f"{channels} numbers", values)
    if min(resolved["std"]) <= 0:
        raise _not_stated(source, "std", "numbers above 0", resolved["std"])
    crop_pct = resolved["crop_pct"]
    if not _is_number(crop_pct) or crop_pct <= 0:  # the export checks the upper limit, which an option can lower
        raise _not_stated(source, "crop_pct", "a number above 0", crop_pct)
    if not isinstance(interpolation, str):
        raise _not_stated(source, "interpolation", "the name of a filter", interpolation)
    if resolved["crop_mode"] not in CROP_MODES:
        raise _not_stated(source, "crop_mode", ", ".join(CROP_MODES), resolved["crop_mode"])
    return KnownImages(
        mean=tuple(float(value) for value in resolved["mean"]),
        std=tuple(float(value) for value in resolved["std"]),
        resize=f"{resolved['crop_mode']}-{name}",
        crop_pct=float(crop_pct),
        labels=_labels(config),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _not_stated(source: str, field: str, expected: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{source}: {field} of the preprocessing: expected {expected}, got {value!r}",
        hint=f"correct {field} in config.json; in a checkpoint of train.py, correct {field} in args and save the "
        "checkpoint again",
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    names = config.get("label_names", config.get("labels"))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names)


def with_present_names(shapes: Shapes, hints: LoadHints) -> dict[str, Tensor] | None:
    """Return the tensors of the file under timm's present names, or None if timm's function names no tensor anew.

    layers.0.downsample → layers.1.downsample, head → head.fc       a Swin of timm before 0.9, or of Microsoft's code

    A tensor that the function ``checkpoint_filter_fn`` of timm's module drops, or resamples for another image size,
    stays as it is in the file, for the later comparison of all tensors with the network.
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


def _deit3_origins(spec: TimmSpec, names: Iterable[str]) -> TensorOrigins:
    origins = tensor_origins(spec, names)
    return {name: re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", key) for name, key in origins.items()}


def _dinov2_origins(spec: TimmSpec, names: Iterable[str]) -> TensorOrigins:
    plain = tensor_origins(spec, names)
    origins: dict[str, str | Conversion] = dict(plain)
    if _has_packed_mlp(spec):
        for name, key in plain.items():
            origins[name] = key.replace(".mlp.fc1.", ".mlp.w12.").replace(".mlp.fc2.", ".mlp.w3.")
    if "network.reg_token" in plain:
        origins["network.reg_token"] = "register_tokens"  # noqa: S105 - a key of a state dict
        origins["network.cls_token"] = Conversion(keys=("cls_token", "pos_embed"), convert=_class_token)
        origins["network.pos_embed"] = Conversion(keys=("pos_embed",), convert=lambda positions: positions[:, 1:])
    return origins


def _class_token(token: Tensor, positions: Tensor) -> Tensor:
    return token + positions[:, :1]


def _has_packed_mlp(spec: TimmSpec) -> bool:
    import torch

    with torch.device("meta"):
        network = network_from_spec(spec)
    sizes = [module for path, module in network.named_modules() if path.endswith("blocks.0.mlp")]
    return bool(sizes) and type(sizes[0]).__name__ == "GluMlp"


def _dinov2_interpolation(shapes: Shapes, hints: LoadHints) -> Interpolation:
    return "timm" if "register_tokens" in shapes else "dino"


TIMM_FILES = CheckpointSource(
    name="timm",
    signature=(),  # every file: timm builds hundreds of architectures, and the other sources are more specific
    spec=infer_spec,
    tensors=tensor_origins,
    known_unused=lambda spec: _COMPUTED,
    interpolation=known_interpolation,
    images=known_images,
    present_names=with_present_names,
    own_hints=("model_args",),
)
DINOV2_FILES = replace(
    TIMM_FILES,
    name="DINOv2",
    signature=(r"mask_token$", r"cls_token$", r"blocks\.0\.ls1\.gamma$"),
    tensors=_dinov2_origins,
    known_unused=lambda spec: {**_COMPUTED, "mask_token": "DINOv2 reads the mask token only in training"},
    interpolation=_dinov2_interpolation,
    present_names=lambda shapes, hints: None,
)
DEIT3_FILES = replace(
    TIMM_FILES,
    name="DeiT III",
    signature=(r"blocks\.0\.gamma_1$", r"blocks\.0\.attn\.qkv\.weight$", r"cls_token$"),
    absent=(r"blocks\.0\.attn\.proj_l\.",),  # CaiT, which stores LayerScale under the same names
    tensors=_deit3_origins,
    interpolation=lambda shapes, hints: "deit",
    present_names=lambda shapes, hints: None,
)
