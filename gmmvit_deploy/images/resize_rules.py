"""Name the rules for resizing images, which `inference.preprocess` defines; imports neither numpy nor Pillow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from gmmvit_deploy.errors import InputError

ResizeRule = Literal[
    "stretch-bilinear",
    "stretch-bicubic",
    "center-bilinear",
    "center-bicubic",
    "shortest-bilinear",
    "shortest-bicubic",
    "squash-bilinear",
    "squash-bicubic",
    "border-bilinear",
    "border-bicubic",
]
"""Rule for resizing images: the way in which an image is fitted to the network's height and width, and the filter.

``stretch`` resizes to the network's height and width, without keeping the aspect ratio. ``center``, ``squash`` and
``border`` are timm's crop modes, and ``shortest`` is that of Hugging Face transformers; `inference.preprocess` defines
them. The filters are antialiased."""
RESIZE_RULES: tuple[ResizeRule, ...] = get_args(ResizeRule)

STATE_PREPROCESSING = (
    "export the checkpoint again with --dataset, or with --mean and --std; also with --resize if gmmvit "
    "export asks for the resize rule"
)
"""The hint for a bundle without normalisation or labels."""


def fit_of(rule: ResizeRule) -> str:
    """Return the way in which a rule fits an image to the network's size: stretch, center, squash or border."""
    return rule.partition("-")[0]


def crops(rule: ResizeRule) -> bool:
    """Return True if a rule resizes to an intermediate size, which ``crop_pct`` determines."""
    return fit_of(rule) != "stretch"


CROP_MODES = ("center", "squash", "border")
"""timm's crop modes."""


def resize_rule_from(text: str) -> ResizeRule:
    """Parse the name of a resize rule.  Errors: InputError when the name is unknown."""
    for rule in RESIZE_RULES:
        if rule == text:
            return rule
    raise InputError(f"resize rule: expected {one_of(RESIZE_RULES)}, got {text!r}")


def require_crop_pct(name: str, crop_pct: float, resize: ResizeRule) -> None:
    """Check a value of crop_pct; a rule ``stretch`` takes only 1.  name: for the message.  Errors: InputError."""
    if isinstance(crop_pct, bool) or not isinstance(crop_pct, int | float) or not 0 < crop_pct <= 1:
        raise InputError(f"{name}: expected a number above 0 and at most 1, got {crop_pct!r}")
    fit = fit_of(resize)
    if fit == "stretch" and crop_pct != 1:
        others = [rule for rule in RESIZE_RULES if rule.endswith(resize.removeprefix(fit)) and rule != resize]
        raise InputError(
            f"{name}: expected 1 with the resize rule {resize}, because this rule does not crop, got {crop_pct}",
            hint=f"type --resize {one_of(others)} for a rule that crops, or leave out --crop-pct",
        )


def resize_rule_from_timm(crop_mode: str | None, interpolation: str) -> ResizeRule:
    """Return the resize rule for timm's crop mode (None or empty is center) and interpolation.

    Errors: InputError for other values. timm takes any unknown crop mode for center, and has filters that no rule has.
    """
    mode = crop_mode or "center"
    if mode not in CROP_MODES:
        raise InputError(f"timm's crop_mode: expected {one_of(sorted(CROP_MODES))}, got {mode!r}")
    filters = sorted({name.partition("-")[2] for name in RESIZE_RULES})
    if interpolation not in filters:
        raise InputError(f"timm's interpolation: expected {one_of(filters)}, got {interpolation!r}")
    return resize_rule_from(f"{mode}-{interpolation}")


def one_of(values: Iterable[object]) -> str:
    """Return the values as text, such as ``1, 2 or 3``."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}"
