"""Values that the user gives because a checkpoint file may not contain them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from gmmvit_deploy.arguments import Refusals, require_counts, require_known, require_number
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.models.specs import CHANNELS, INTERPOLATIONS, Interpolation

WeightsKind: TypeAlias = Literal["trained", "averaged"]
"""trained: the weights after the last step of the optimiser.  averaged: the moving average (EMA) of the weights."""
WEIGHTS_KINDS: tuple[WeightsKind, ...] = get_args(WeightsKind)

Pool: TypeAlias = Literal["cls", "mean"]
"""What the classifier reads.  cls: the class token.  mean: the mean of all tokens."""
POOLS: tuple[Pool, ...] = get_args(Pool)
TypedPool: TypeAlias = Literal["cls", "mean", "pooler"]
"""A value of ``--set pool``.  pooler: ``pooler_output`` of a backbone of Hugging Face transformers."""
TYPED_POOLS: tuple[TypedPool, ...] = get_args(TypedPool)

SOURCES = ("spt-lsa", "vit-pytorch")
"""Code bases whose files can have the same names and shapes of tensors, and other logits."""

OwnHint: TypeAlias = Literal["pool", "scale_adjustment", "transform_scale", "decomposed_stages", "model_args"]
"""A field of `LoadHints` that only the networks of some sources have (`CheckpointSource.own_hints`)."""
OWN_HINTS: tuple[OwnHint, ...] = get_args(OwnHint)


@dataclass(frozen=True, slots=True)
class Setting:
    """A name of ``--set NAME=VALUE``.  names: the values, if they are names.

    read: returns the value of a text, and raises ValueError or KeyError for any other text.
    """

    meaning: str
    example: str
    read: Callable[[str], Any] = str
    names: tuple[str, ...] = ()


def setting(meaning: str, example: str, read: Callable[[str], Any] = str, *, names: tuple[str, ...] = ()) -> Any:
    """Return a field of `LoadHints`, None by default, that ``--set`` can state: with its help and how it is read."""
    return field(default=None, metadata={"setting": Setting(meaning, example, read, names)})


def _yes_or_no(text: str) -> bool:
    return {"yes": True, "no": False}[text]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHints:
    """What the user states about a network because its checkpoint may not show it; None for what is not stated.

    Example: ``LoadHints(model="vit_tiny_patch16_224")``; ``LoadHints(heads=3, channels=3)``.

    image_size: the side of the images in pixels.
    model: the name of an architecture of timm, or ``torchvision:VisionTransformer``, or a class as ``FILE.py:CLASS``.
    model_args: the arguments with which the training code built the model.
    resize_to: the side in pixels of the images for which the model is built again after loading.
    head: the path of the file of a linear classifier for a backbone without classifier, such as a DINO backbone:
    a checkpoint, or an .npz file with scikit-learn's ``coef_`` and ``intercept_``.
    labels, prompts: of a network of images and texts, the names of the classes and the sentences with ``{}`` in place
    of the name, whose texts become the classes; several prompts are averaged.
    only_features: True if only the features of the network are needed, so that a file may have no classifier.
    only_tensors: True if the images are prepared outside of this package, so that it need not know how.
    `SETTINGS` explains the others.
    Errors: InputError when a value is out of range.
    """

    heads: int | None = setting(
        "number of attention heads; of a model with several stages, in the first stage. Required if the tensors do not "
        "show it and no --preset is given, for example for a ViT without masks",
        "3",
        int,
    )
    preset: str | None = None
    closed_form: bool | None = setting(
        "yes if the training code computed Gaussian mixture masks with the formula of a Gaussian from the distances "
        "between tokens, and not as powers of a base matrix in the checkpoint. A wrong form gives wrong logits",
        "yes",
        _yes_or_no,
        names=("yes", "no"),
    )
    image_size: int | None = None
    channels: int | None = setting(
        "channels of the images: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha. Required if no tensor shows it",
        "3",
        int,
    )
    weights: str | None = setting(
        "weights to take from a checkpoint that holds several sets, required there: trained, as the optimiser left "
        "them, averaged, their moving average (EMA), or the key of the set, such as ema.shadow",
        "averaged",
    )
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    resize_to: int | None = None
    interpolation: Interpolation | None = setting(
        "for --resize-to: the code whose algorithm resamples the position embeddings; without it, the code that wrote "
        "the checkpoint",
        "timm",
        names=INTERPOLATIONS,
    )
    head: str | None = None
    head_name: str | None = setting(
        "classifier to take from a --head file of the linear evaluation of DINOv2 or DINOv3, which holds many",
        "classifier_4_blocks_avgpool_True_lr_0_01000",
    )
    head_blocks: int | None = setting(
        "number of last blocks whose class tokens the classifier of --head reads", "4", int
    )
    head_average: bool | None = setting(
        "yes if the classifier of --head also reads the mean of the patches", "yes", _yes_or_no, names=("yes", "no")
    )
    source: str | None = setting(
        "code that wrote the checkpoint. Required if the names of the tensors fit both, as for a CaiT without masks",
        "spt-lsa",
        names=SOURCES,
    )
    pool: TypedPool | None = setting(
        "what the classifier reads: cls, the class token, or mean, the mean of all tokens. Required if no tensor shows "
        "it, as for DeepViT and small-data ViT of vit-pytorch. For a backbone of Hugging Face transformers, its "
        "features: cls, or pooler, its pooler_output",
        "mean",
        names=TYPED_POOLS,
    )
    scale_adjustment: float | None = setting(
        "of a DeepViT: the training code's scale_adjustment, 0.5 for deepvit_S and deepvit_L, 1 for the others",
        "0.5",
        float,
    )
    transform_scale: bool | None = setting(
        "of a DeepViT: yes if the mixed attention weights are also divided by √(head dim), as in deepvit_S",
        "yes",
        _yes_or_no,
        names=("yes", "no"),
    )
    decomposed_stages: tuple[int, ...] | None = setting(
        "of an RMT: the stages, counted from 1, whose attention is decomposed into rows and columns, or none. A wrong "
        "list raises no error, but the predictions are wrong",
        "1,2,3",
        lambda text: () if text == "none" else tuple(map(int, text.split(","))),
    )
    labels: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    only_features: bool = False
    only_tensors: bool = False

    def __post_init__(self) -> None:
        require_counts(
            image_size=self.image_size, resize_to=self.resize_to, heads=self.heads, head_blocks=self.head_blocks
        )
        for name, values in (
            ("channels", CHANNELS),
            ("source", SOURCES),
            ("pool", TYPED_POOLS),
            ("interpolation", INTERPOLATIONS),
        ):
            require_known(name, getattr(self, name), values)
        if self.interpolation is not None and self.resize_to is None:
            raise InputError(
                "interpolation resamples position embeddings for another image size, which is not given",
                hint="add --resize-to PIXELS, or leave --set interpolation out",
            )
        for name in ("labels", "prompts"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for prompt in self.prompts:
            if "{}" not in prompt:
                raise InputError(
                    f"--prompt {prompt!r}: expected {{}} in place of the label",
                    hint="type for example --prompt 'a photo of a {}'",
                )
        if self.prompts and not self.labels:
            raise InputError(
                "--prompt makes classes of labels, which are not given",
                hint="add --labels FILE with a label on each line",
            )
        if self.labels and not self.prompts:
            raise InputError(
                "labels of LoadHints become the classes by prompts, which are not given",
                hint="add prompts, or give the labels of a trained classifier to ExportOptions",
            )
        if self.prompts and self.head is not None:
            raise InputError("--prompt and --head both state the classes", hint="leave one of them out")
        described = (self.head_blocks, self.head_average, self.head_name)
        if self.head is None and any(value not in (None, False) for value in described):
            raise InputError(
                "head_blocks, head_average and head_name describe a linear head, which is not given",
                hint="add --head FILE",
            )
        require_number(
            "scale_adjustment", self.scale_adjustment, "a number above 0", lambda value: 0 < value < math.inf
        )
        stages = self.decomposed_stages
        if stages is not None and (min(stages, default=1) < 1 or len({*stages}) != len(stages)):
            raise InputError(
                f"decomposed_stages: expected different numbers of at least 1, got {','.join(map(str, stages))}",
                hint="type for example --set decomposed_stages=1,2,3; the first stage has the number 1",
            )

    def typed(self) -> dict[str, str]:
        """Return what the options state about the network, but ``model_args``: field → option, as ``--set heads=4``."""
        typed = {} if self.image_size is None else {"image_size": f"--image-size {self.image_size}"}
        for name in SETTINGS:
            if (value := getattr(self, name)) is not None:
                typed[name] = f"--set {name}={_text_of(value)}"
        return typed

    def own(self) -> dict[OwnHint, str]:
        """Return field → the option as typed, for the fields of `OWN_HINTS` that the user gave."""
        typed = self.typed() | ({"model_args": "--model-args"} if self.model_args else {})
        return {name: typed[name] for name in OWN_HINTS if name in typed}


SETTINGS: dict[str, Setting] = {
    each.name: each.metadata["setting"] for each in fields(LoadHints) if "setting" in each.metadata
}
"""Name of ``--set NAME=VALUE`` → what it is."""


def settings_from(texts: Sequence[str]) -> dict[str, Any]:
    """Read texts of the form NAME=VALUE.  Errors: InputError for an unknown name or a value of another form."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        known = SETTINGS.get(name)
        if known is None or not equals:
            raise InputError(
                f"--set {text}: expected NAME=VALUE with one of the names {', '.join(SETTINGS)}",
                hint="type for example --set heads=3",
            )
        try:
            values[name] = known.read(value)
        except (ValueError, KeyError) as exc:
            forms: dict[Any, str] = {int: "a whole number", float: "a number"}
            expected = " or ".join(known.names) or forms.get(known.read, "numbers separated by commas, or none")
            raise InputError(
                f"--set {name}: expected {expected}, got {value!r}",
                hint=f"type for example --set {name}={known.example}",
            ) from exc
    return values


def _text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "none"
    return str(value)


def own_class_of(model: str | None) -> tuple[str, str] | None:
    """Return (path of the file, name of the class) of ``--model FILE.py:CLASS``, or None for any other ``--model``."""
    file, _, name = (model or "").rpartition(":")
    if file.endswith(".py") and name.isidentifier():
        return file, name
    if file.endswith(".py") or name.endswith(".py"):
        path = file if file.endswith(".py") else name
        raise InputError(
            f"--model: expected FILE.py:CLASS, got {model!r}",
            hint=f"type --model {path}:CLASS with a class of the file",
        )
    return None


def require_own_class(hints: LoadHints, path: str, name: str) -> None:
    """Check that no option states what the class ``path:name`` determines.  Errors: InputError."""
    refusals = Refusals()
    stated = {"--preset": hints.preset, "--head": hints.head, "--resize-to": hints.resize_to}
    stated |= {f"--set {field}": getattr(hints, field) for field in SETTINGS if field not in ("channels", "weights")}
    for option, value in stated.items():
        refusals.refuse(
            value is not None,
            f"{option} does not apply to the class {name} of {path}, which determines the architecture",
            hint=f"leave {option} out; type --model-args for the arguments of {name}",
        )
    refusals.raise_all()
