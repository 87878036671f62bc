"""The arguments with which a training script built a model of timm, from the checkpoint and the user's options.

train.py        args: model, model_kwargs, in_chans, gp, img_size, input_size
model folder    config.json: architecture, model_args, global_pool, pretrained_cfg
any file        --model, --model-args, --image-size, --set heads; the number of position embeddings

``--model`` and ``--model-args`` replace the values of the file. ``--set heads`` must not contradict the arguments of
the model. ``--image-size`` must not contradict the file if timm builds the architecture for a single image size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gmmvit_deploy.errors import CheckpointError, SpecError
from gmmvit_deploy.models.families.timm.network import (
    architecture_from,
    network_from_spec,
    present_name,
    refuse_arguments,
    require_timm,
    without_refused,
)
from gmmvit_deploy.models.families.timm.spec import CONV_STEM_VIT, TimmSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.record import TrainingRecord
from gmmvit_deploy.models.sources.shapes import MAX_SIDE, Shapes, image_sides, refuse_depth
from gmmvit_deploy.models.specs import MaskSpec

_DEFAULT = "timm's default for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The position embeddings pos_embed (1, tokens, D) of a file: tokens = prefix + (height / patch) · (width / patch).

    tokens: their number in the file.  prefix: how many belong to class token and registers.
    patch: (height, width) of a patch in pixels.
    """

    tokens: int
    prefix: int
    patch: tuple[int, int]

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of the images in pixels, for a square grid; None if the tokens are those of no square."""
        patches = self.tokens - self.prefix
        side = math.isqrt(max(patches, 0))
        return (side * self.patch[0], side * self.patch[1]) if side and side**2 == patches else None

    @property
    def as_square(self) -> str:
        """Say that the size is that of a square, because the tokens do not tell it from a rectangle."""
        return f"{self}; assumed to be square, else type --model-args '{{\"img_size\": [HEIGHT, WIDTH]}}'"

    def tokens_for(self, size: tuple[int, int]) -> int:
        """Return the number of position embeddings for images of ``size``."""
        return self.prefix + (size[0] // self.patch[0]) * (size[1] // self.patch[1])

    def __str__(self) -> str:
        height, width = self.patch
        return f"pos_embed ({self.tokens} tokens), patch {height if height == width else f'{height} × {width}'}"


def positions_of(shapes: Shapes, architecture: str, model_args: Mapping[str, Any]) -> Positions | None:
    """Return the position embeddings, or None if the file has none that belong to the patches of a grid.

    A model that timm cannot build gives None too: the later comparison with all tensors says why.
    """
    from torch import Tensor

    from gmmvit_deploy.models.layers.shapes_only import shapes_only

    stored, weight = shapes.tensors.get("pos_embed"), shapes.tensors.get("patch_embed.proj.weight")
    if stored is None or stored.dim() != 3 or model_args.get("dynamic_img_size"):
        return None
    arguments = {name: value for name, value in model_args.items() if name != "img_size"}
    with shapes_only():
        spec = TimmSpec(architecture=architecture, model_args=arguments, image_size=1, classes=1, mask=MaskSpec())
        try:
            network = network_from_spec(spec)
        except SpecError:
            return None
    own, embedding = getattr(network, "pos_embed", None), getattr(network, "patch_embed", None)
    image, grid = (getattr(embedding, name, None) for name in ("img_size", "grid_size"))
    if not isinstance(own, Tensor) or own.dim() != 3 or image is None or grid is None:
        return None
    own_weight = getattr(getattr(embedding, "proj", None), "weight", None)
    if weight is not None and own_weight is not None and weight.shape[2:] != own_weight.shape[2:]:
        return None  # the comparison of all tensors says that the patch differs
    # DINOv2's files with registers have a position of the class token, which timm adds to the token itself.
    prefix = 1 if "register_tokens" in shapes else own.shape[1] - math.prod(grid)
    patch = (image[0] // grid[0], image[1] // grid[1])
    return Positions(tokens=int(stored.shape[1]), prefix=prefix, patch=patch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of ``timm.create_model``, with the numbers of classes and channels only if they are stated.

    size: (height, width) of the images in pixels; None if the user, the file and the architecture state no size.
    size_from: where the size comes from, such as ``img_size of args``.
    cfg: timm's default configuration of the architecture.
    """

    architecture: str
    model_args: dict[str, Any]
    size: tuple[int, int] | None
    size_from: str
    cfg: Mapping[str, Any]


def is_train_script(record: TrainingRecord) -> bool:
    """Return True if timm's train.py wrote the record.  Such a record states the preprocessing."""
    return all(name in record.args for name in ("model", "crop_pct", "mean", "std", "interpolation"))


def arguments_of(shapes: Shapes, hints: LoadHints) -> Arguments:
    """Return the arguments for a file; CheckpointError or SpecError for what is unknown, contradictory or refused."""
    record = shapes.record
    text, where = name_of(shapes, hints)
    architecture = architecture_from(text, where=where)
    if architecture == CONV_STEM_VIT:
        raise CheckpointError(
            f"{where}: {CONV_STEM_VIT} is no architecture of timm",
            hint=f"type --model {CONV_STEM_VIT} if torchvision's code wrote the weights",
        )
    if record.config:
        _refuse_addresses(shapes.source, record.config)
    stated = _stated_args(record, hints.model_args)
    refuse_arguments(hints.model_args, where="--model-args")
    model_args = {**stated, **hints.model_args}
    refuse_arguments(model_args, where=shapes.source)
    model_args = without_refused(model_args)
    for name in ("depth", "depths", "layers"):
        hint = f"type --model-args with the {name} of training"
        refuse_depth(shapes, {name: model_args.get(name)}, where=shapes.source, hint=hint)
    if hints.heads is not None:
        if model_args.get("num_heads", hints.heads) != hints.heads:
            raise CheckpointError(
                f"{shapes.source}: --set heads={hints.heads}, but the arguments of the model have num_heads "
                f"{model_args['num_heads']}",
                hint=f"omit --set heads; or type --model-args '{{\"num_heads\": {hints.heads}}}'",
            )
        model_args["num_heads"] = hints.heads
    cfg = default_cfg(text)
    if model_args.get("dynamic_img_size"):
        return _with_dynamic_size(shapes, hints, architecture, model_args, cfg)
    size, where = _size(shapes, hints, model_args, cfg)
    positions = positions_of(shapes, architecture, model_args)
    if positions is not None:
        size, where = _fitting(shapes.source, positions, size, where, hints)
    if size is not None and (cfg.get("fixed_input_size") or "img_size" in model_args):
        model_args["img_size"] = list(size)
    return Arguments(architecture=architecture, model_args=model_args, size=size, size_from=where, cfg=cfg)


def _fitting(
    source: str, positions: Positions, size: tuple[int, int] | None, where: str, hints: LoadHints
) -> tuple[tuple[int, int] | None, str]:
    """Return the size that fits the position embeddings of the file, and where the size comes from.

    They replace only timm's default size. If they fit no square image, the later comparison says what differs.
    """
    shown = positions.size
    if shown is None or (size is not None and positions.tokens_for(size) == positions.tokens):
        return size, where
    if size is None or where.startswith(_DEFAULT):
        return shown, positions.as_square
    raise CheckpointError(
        f"{source}: {where} is {size[0]} × {size[1]} pixels, which have {positions.tokens_for(size)} position "
        f"embeddings, but the file has {positions}: images of {shown[0]} × {shown[1]} pixels",
        hint=f"leave --image-size out; for another size than in training, type --resize-to {size[0]}"
        if hints.image_size is not None
        else f"type --model-args '{{\"img_size\": {shown[0]}}}' if the weights are the right ones",
    )


def _with_dynamic_size(
    shapes: Shapes, hints: LoadHints, architecture: str, model_args: dict[str, Any], cfg: Mapping[str, Any]
) -> Arguments:
    """Return the arguments of a model that resamples its positions for the size of each image.

    ``img_size`` is the size of the stored positions, and the images may have another size.
    """
    stated = {name: value for name, value in model_args.items() if name != "img_size"}
    without = replace(shapes.record, config={}) if shapes.record.args else shapes.record
    images = Shapes(shapes.tensors, shapes.source, record=without)
    size, where = _size(images, hints, stated, {})
    if size is None:
        size, where = image_sides(model_args.get("img_size")), "img_size of the model's arguments"
    if size is None:
        size, where = _size(shapes, hints, stated, cfg)
    return Arguments(architecture=architecture, model_args=model_args, size=size, size_from=where, cfg=cfg)


def name_of(shapes: Shapes, hints: LoadHints) -> tuple[str, str]:
    """Return (name of the architecture, possibly with a tag; the option or the file with it), or CheckpointError."""
    if hints.model is not None:
        return hints.model, "--model"
    record = shapes.record
    for value in (record.config.get("architecture"), record.entries.get("arch"), record.args.get("model")):
        if isinstance(value, str) and value:
            return value, shapes.source
    first = ", ".join(list(shapes.tensors)[:4])
    raise CheckpointError(
        f"{shapes.source}: unknown architecture; the first keys of the file are {first}",
        hint="if timm builds the model, type --model with timm's name of the architecture, and --model-args with the "
        "arguments of training; for a class in a Python file of yours, type --model FILE.py:CLASS",
    )


def _stated_args(record: TrainingRecord, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the file states, without those of training.  typed: the user's, which replace them."""
    if record.config:
        config = record.config
        args: dict[str, Any] = {k: v for k, v in dict(config.get("model_args") or {}).items() if v is not None}
        if isinstance(config.get("global_pool"), str):
            args.setdefault("global_pool", config["global_pool"])
        return {k: v for k, v in args.items() if not k.startswith("drop_")}
    args = {k: v for k, v in record.args.arguments("model_kwargs", typed).items() if v is not None}
    if isinstance(pool := record.args.get("gp"), str) and pool:
        args["global_pool"] = pool
    if is_train_script(record):
        args |= {name: record.args[name] for name in ("bn_eps", "in_chans") if record.args.get(name) is not None}
    return {k: v for k, v in args.items() if not k.startswith("drop_")}


def default_cfg(text: str) -> Mapping[str, Any]:
    """Return timm's configuration for a name such as ``vit_base_patch16_224.dino``, or SpecError.

    The tag after the dot names the weights that training started from, with their own image size and preprocessing.
    """
    timm, name = require_timm(), present_name(text)
    try:
        cfg: Mapping[str, Any] = timm.get_pretrained_cfg(name, allow_unregistered=False).to_dict()
    except RuntimeError as exc:
        raise SpecError(
            f"timm {timm.__version__} has no weights of the name {name!r}",
            hint=f"type --model {name.partition('.')[0]}, or with a tag of timm after the dot",
        ) from exc
    return cfg


def default_origin(text: str) -> str:
    name, present = text.removeprefix("timm:"), present_name(text)
    return f"{_DEFAULT} {name}" + (f", now {present}" if present != name else "")


def _size(
    shapes: Shapes, hints: LoadHints, model_args: Mapping[str, Any], cfg: Mapping[str, Any]
) -> tuple[tuple[int, int] | None, str]:
    """Return (height, width), and where they come from: the user, else the file, else timm's default.

    The default counts only if the architecture has a fixed input size, or if the args of timm's train.py state no size.
    """
    where, stated = _stated_size(shapes.record, hints, model_args)
    fixed = bool(cfg.get("fixed_input_size"))
    asked = None if hints.image_size is None else (hints.image_size, hints.image_size)
    size = image_sides(stated)
    if asked is not None:
        if size not in (None, asked) and (fixed or "img_size" in model_args):
            raise CheckpointError(
                f"{shapes.source}: --image-size {hints.image_size} contradicts the file: {where} is {stated!r}",
                hint=f"omit --image-size, or type --resize-to {hints.image_size} instead to change the size of "
                f"the model; if the file is wrong, type --model-args '{{\"img_size\": {hints.image_size}}}'",
            )
        return asked, "--image-size"
    of_train_script = is_train_script(shapes.record) or "img_size" in shapes.record.args
    if stated is None and (fixed or of_train_script):
        return image_sides(_last_two(cfg.get("input_size"))), default_origin(name_of(shapes, hints)[0])
    if stated is not None and size is None:
        raise CheckpointError(
            f"{shapes.source}: {where} is {stated!r}; expected the height and the width of the images, each from 1 to "
            f"{MAX_SIDE} pixels",
            hint="type --image-size with the size of the training images in pixels",
        )
    return size, where


def _stated_size(record: TrainingRecord, hints: LoadHints, model_args: Mapping[str, Any]) -> tuple[str, Any]:
    """Return (name of the setting, value) of the first setting that states the image size; the value None if none."""
    cfg = record.config.get("pretrained_cfg")
    holder = "model_args of config.json" if record.config else "model_kwargs of args"
    settings = {
        "--model-args img_size": hints.model_args.get("img_size"),
        f"img_size of {holder}": model_args.get("img_size"),
        "input_size of args": _last_two(record.args.get("input_size")),
        "img_size of args": record.args.get("img_size"),
        "input_size of pretrained_cfg": _last_two(cfg.get("input_size")) if isinstance(cfg, dict) else None,
        "input_size of config.json": _last_two(record.config.get("input_size")),
    }
    return next(((name, value) for name, value in settings.items() if value is not None), ("", None))


def _last_two(value: Any) -> Any:
    return value[1:] if isinstance(value, list | tuple) and len(value) == 3 else value


def _refuse_addresses(source: str, config: Mapping[str, Any]) -> None:
    stated = config.get("pretrained_cfg")
    for holder in (config, stated if isinstance(stated, dict) else {}):
        for name in ("url", "hf_hub_id", "hf_hub_filename", "file"):
            if holder.get(name):
                raise CheckpointError(
                    f"{source}: config.json has {name} {holder[name]!r}; gmmvit downloads nothing and reads only the "
                    "weights in the folder",
                    hint=f"remove {name} from config.json if the weights in the folder are the right weights",
                )
