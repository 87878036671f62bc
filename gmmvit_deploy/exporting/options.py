"""What the user states about a checkpoint and its bundle, completed by what the checkpoint states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, get_args

from gmmvit_deploy.arguments import Refusals, require_counts, require_known
from gmmvit_deploy.bundle.artifacts import InputKind
from gmmvit_deploy.checkpoints.reading import states_model
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.names import clean_name, shown_names
from gmmvit_deploy.images.resize_rules import RESIZE_RULES, ResizeRule, crops, require_crop_pct
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference.labels import Task, distinct_names
from gmmvit_deploy.models.sources.hints import LoadHints, own_class_of, require_own_class
from gmmvit_deploy.models.sources.record import KnownImages
from gmmvit_deploy.models.sources.shapes import asked_image
from gmmvit_deploy.models.specs import OUTPUTS, ModelSpec, OutputName

Thresholds = tuple[float, ...] | float | Mapping[str, float]
"""A threshold for each label in the order of the labels, the same threshold for all labels, or label → threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The input and the labels of the network to export.

    Example: ``ExportOptions(mean=(0.5,) * 3, std=(0.5,) * 3, resize="center-bicubic", labels=("cat", "dog"))``.

    input_kind: ``pixels`` or ``tensor``. A graph that takes ``pixels`` (uint8) normalises the images, so mean and
    std are required. A graph that takes ``tensor`` (float32) expects normalised images; mean and std are then
    optional, and a server normalises its images with mean and std if given.
    max_batch: the largest batch that the bundle accepts.
    mean, std: the mean and the standard deviation of each channel, for pixel values scaled to [0, 1]; a single number
    is that of every channel.
    resize: the rule by which the images were resized when the model was evaluated; None is ``stretch-bilinear``.
    crop_pct: the side of the crop divided by the side after resizing, as in `ImageSpec`; None is 1.
    labels: the class names in the order of the class index, as ``ImageFolder.classes`` of torchvision; with None, the
    names are the class indices from 0.
    labels_source: where the labels come from, for messages.
    outputs: the outputs of the network: ``("logits",)``, ``("features",)``, or both; one may be its name alone. Without
    logits, labels are neither required nor stored.
    normalise: True to give the features unit length, so that a dot product of two is their cosine.
    task: the task of the network; None is ``single-label``, unless the checkpoint states that it is multi-label.
    thresholds: for a multi-label network, the probability from which on an image has a label; None for single-label. A
    label that several classes have is written with its index: ``crane (134)``.
    thresholds_source: where the thresholds come from, for messages.
    A value that is None is first taken from the checkpoint, if the checkpoint states the value.
    Errors: InputError when ``max_batch`` is below 1, when ``resize`` does not take ``crop_pct``, when mean is given
    without std or std without mean, or when they are not those of pixel values in [0, 1].
    """

    input_kind: InputKind = "pixels"
    max_batch: int = 64
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: ResizeRule | None = None
    crop_pct: float | None = None
    labels: tuple[str, ...] | None = None
    labels_source: str = "labels"
    outputs: tuple[OutputName, ...] = ("logits",)
    normalise: bool = False
    task: Task | None = None
    thresholds: Thresholds | None = None
    thresholds_source: str = "thresholds"

    @property
    def has_logits(self) -> bool:
        return "logits" in self.outputs

    @property
    def agreed_task(self) -> Task:
        """The task of options that are complete."""
        return self.task or "single-label"

    def __post_init__(self) -> None:
        for name in ("mean", "std", "labels", "outputs"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            elif isinstance(value, Real) or (name == "outputs" and isinstance(value, str)):
                object.__setattr__(self, name, (value,))
        refusals = Refusals()
        for check in (self._check_names, self._check_thresholds, self._check_images):
            with refusals.collected():
                check()
        with refusals.collected():
            require_counts(max_batch=self.max_batch)
        refusals.raise_all()

    def _check_names(self) -> None:
        require_known("input_kind", self.input_kind, get_args(InputKind))
        require_known("resize", self.resize, RESIZE_RULES)
        require_known("task", self.task, get_args(Task))
        if self.outputs not in OUTPUTS:
            raise InputError(f'outputs: expected "logits", "features" or ("logits", "features"), got {self.outputs!r}')
        if self.normalise and "features" not in self.outputs:
            raise InputError(
                "--normalise gives features unit length, and the outputs have no features",
                hint="add --outputs features or --outputs both",
            )
        if isinstance(self.labels, str):
            raise InputError(f"labels: expected a list of names, got {self.labels!r}")

    def _check_thresholds(self) -> None:
        if self.task == "multi-label" and not self.has_logits:
            raise InputError(
                "the task multi-label says how logits become labels, and the outputs have no logits",
                hint="leave --task out, or type --outputs both",
            )
        if self.task == "multi-label" and self.thresholds is None:
            raise InputError(
                "the task multi-label needs thresholds: the probability from which on an image has a label",
                hint="add --thresholds FILE with a number for each label, or a number such as --thresholds 0.5",
            )
        if self.agreed_task == "single-label" and self.thresholds is not None:
            raise InputError(
                "thresholds belong to a multi-label network, and the task is single-label",
                hint="add --task multi, or leave --thresholds out",
            )

    def _check_images(self) -> None:
        if self.crop_pct is not None:
            rule = self.resize if self.resize in RESIZE_RULES else None
            require_crop_pct("crop_pct", self.crop_pct, rule or "center-bilinear")  # the checkpoint's rule may crop
        if self.mean or self.std:  # a network with more channels takes the only number for all
            channels = max(len(self.mean or ()), len(self.std or ()))
            ImageSpec(height=1, width=1, channels=channels, **self._normalisation(channels))

    def image_spec(self, spec: ModelSpec) -> ImageSpec:
        """Return the `ImageSpec` of a network, by options that are complete.  Errors: InputError when one does not fit.

        A single number of mean or std is that of every channel.
        """
        return ImageSpec(
            height=spec.image_shape[0],
            width=spec.image_shape[1],
            channels=spec.channels,
            resize=self.resize or "stretch-bilinear",
            crop_pct=1.0 if self.crop_pct is None else self.crop_pct,
            **self._normalisation(spec.channels),
        )

    def _normalisation(self, channels: int) -> dict[str, Any]:
        values = {"mean": self.mean, "std": self.std}
        return {name: each * channels if each and len(each) == 1 else each for name, each in values.items()}

    def fitting_thresholds(self, labels: Sequence[str]) -> tuple[float, ...]:
        """Return the threshold of each label; empty for single-label.

        Errors: InputError when the thresholds are not those of the labels, or when a threshold is not between 0 and 1.
        """
        if self.thresholds is None:
            return ()
        if isinstance(self.thresholds, Mapping):
            numbers = self._in_order(self.thresholds, distinct_names(labels))
        else:
            numbers = (self.thresholds,) * len(labels) if isinstance(self.thresholds, float) else self.thresholds
        if len(numbers) != len(labels):
            raise InputError(
                f"{self.thresholds_source}: expected {len(labels)} thresholds, one for each label, got {len(numbers)}",
                hint="write a number for each label, in the order of the labels",
            )
        for label, number in zip(labels, numbers, strict=True):
            if not 0 < number < 1:
                raise InputError(
                    f"{self.thresholds_source}: the threshold of {label}: expected a number above 0 and below 1, got "
                    f"{number:g}",
                    hint="a threshold is a probability, such as 0.5",
                )
        return numbers

    def _in_order(self, thresholds: Mapping[str, float], names: Sequence[str]) -> tuple[float, ...]:
        """Return the thresholds in the order of ``names``.  Errors: InputError when their names are others."""
        cleaned = [clean_name(name, self.thresholds_source) for name in thresholds]
        if repeated := [name for name in cleaned if cleaned.count(name) > 1]:
            raise InputError(
                f"{self.thresholds_source}: expected one threshold for {repeated[0]}, got {cleaned.count(repeated[0])}",
                hint="write each label once",
            )
        thresholds = dict(zip(cleaned, thresholds.values(), strict=True))
        missing = [name for name in names if name not in thresholds]
        unknown = [name for name in thresholds if name not in names]
        if missing or unknown:
            other = f"there is no label {shown_names(unknown[:1])}" if unknown else ""
            other = other or f"{shown_names(missing[:1])} is missing"
            raise InputError(
                f"{self.thresholds_source}: expected {len(names)} thresholds, one for each label, got "
                f"{len(thresholds)}: {other}",
                hint="write each label once; a label that occurs several times is written with its index: crane (134)",
            )
        return tuple(thresholds[name] for name in names)

    def _check_task(self, known: KnownImages) -> None:
        """Errors: InputError for another task than the checkpoint's, which never sets multi-label by itself."""
        if known.task in (None, self.agreed_task) or not self.has_logits:
            return
        if known.task == "multi-label":
            raise InputError(
                f"{known.task_evidence}, so that an image can have several labels; expected --task multi, got "
                f"{'--task single' if self.task else 'no --task'}",
                hint="add --task multi, and --thresholds FILE with the probability from which on an image has a label, "
                "for each label",
            )
        raise InputError(
            f"{known.task_evidence}, so that an image has exactly one label; expected --task single, got --task multi",
            hint="leave --task and --thresholds out; if an image can have several labels, correct the file",
        )

    def completed(self, known: KnownImages, *, default: ResizeRule | None = "stretch-bilinear") -> ExportOptions:
        """Return the options with the values of the checkpoint in place of None.

        default: the resize rule if neither the checkpoint nor the user states a rule; None if the user must state the
        rule.
        Errors: InputError when ``input_kind`` is ``pixels`` and mean, std or the resize rule are missing, when
        the resize rule is not supported or does not take ``crop_pct``, or when the checkpoint states another task.
        """
        self._check_task(known)
        stated = next((rule for rule in RESIZE_RULES if rule == known.resize), None)
        if self.resize is None and stated != known.resize:
            raise InputError(
                f"the checkpoint states the resize rule {known.resize}, which is not supported",
                hint=f"type --resize with the closest of {', '.join(RESIZE_RULES)}; another filter changes the logits",
            )
        rule = self.resize or stated or default
        # A rule without crop, which the user typed, takes the place of the checkpoint's rule and crop.
        crop_pct = known.crop_pct if self.crop_pct is None and crops(rule or "stretch-bilinear") else self.crop_pct
        if self.crop_pct is None and crop_pct is not None and crop_pct > 1:
            raise InputError(
                f"the checkpoint states crop_pct {crop_pct:g}, and values above 1 are not supported",
                hint="type --crop-pct 1 for the closest supported preprocessing, which changes the logits",
            )
        mean, std = self.mean or known.mean, self.std or known.std
        if self.input_kind == "pixels":
            missing = [name for name, value in (("mean", mean), ("std", std)) if value is None]
            _require_stated(missing + ["resize"] * (rule is None), known.usual)
        return replace(
            self,
            mean=mean,
            std=std,
            resize=rule or "stretch-bilinear",
            crop_pct=crop_pct,
            labels=self.labels or known.labels,
            labels_source=self.labels_source if self.labels else "the labels that the checkpoint states",
        )

    def origins(self, known: KnownImages, typed: ExportOptions, *, family: str = "") -> dict[str, str]:
        """Return where the values come from that the user did not type, such as mean → ``mean of args``.

        self: the completed options.  typed: the options before.
        family: the name of the family whose default resize rule was taken, if any.
        """
        found: dict[str, str] = {}
        for name in ("mean", "std", "resize", "crop_pct", "labels"):
            value = getattr(self, name)
            if value is None or getattr(typed, name) is not None or (name == "labels" and not self.has_logits):
                continue
            if getattr(known, name) is not None:
                found[name] = known.origins.get(name, "the checkpoint")
            elif family and self.mean is not None:  # only the resize rule has a default
                found[name] = f"the default of the family {family}"
        if self.has_logits and self.labels is None:
            found["labels"] = "the class indices; --labels gives names"
        return found


def _require_stated(missing: Sequence[str], usual: Mapping[str, str]) -> None:
    """Check that the preprocessing is stated.  missing: of mean, std and resize.  usual: as in `KnownImages`."""
    if not missing:
        return
    options = [f"--{name}" for name in missing if name != "resize"]
    to_type = [f"--dataset NAME, or {' and '.join(options)}"] if options else []
    to_type += ["--resize METHOD"] if "resize" in missing else []
    methods = f". METHOD: {', '.join(RESIZE_RULES)}" if "resize" in missing else ""
    line = " ".join(usual[name] for name in missing if name in usual)
    raise InputError(
        "an input of pixels needs the mean and the std of training, and the resize rule of evaluation, because "
        "the server prepares the images; the checkpoint does not state the "
        f"{' and the '.join('resize rule' if name == 'resize' else name for name in missing)}",
        hint=(f"if training and evaluation had timm's values for this name, add {line}; otherwise " if line else "")
        + f"add {'; also add '.join(to_type)}; or add --input tensor to prepare the images outside the graph{methods}",
    )


def refuse_unstated(checkpoint: Path, hints: LoadHints, options: ExportOptions, refusals: Refusals) -> None:
    """Collect what is wrong or missing beside a class of the user's own, before the checkpoint is read."""
    if (own_class := own_class_of(hints.model)) is None:
        return
    hint = "type --model with the path of a Python file"
    refusals.refuse(not Path(own_class[0]).is_file(), f"--model {own_class[0]}: no such file", hint=hint)
    with refusals.collected():
        require_own_class(hints, *own_class)
    if states_model(checkpoint):
        return
    with refusals.collected():
        asked_image(str(checkpoint), hints, example="--image-size 32 --set channels=3")
    with refusals.collected():
        options.completed(KnownImages(), default=None)
