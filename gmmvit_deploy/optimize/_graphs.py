"""Convert what a bundle lacks: each precision, and int8 in each of its three forms.

    static   activations have ranges, which calibration images set; for every runtime
    mixed    as many projections as a gate needs are in the dynamic form or in float32; for OpenVINO
    dynamic  activations are quantised while the network runs; for OpenVINO, needs no images

Graphs that the bundle has are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import forms_in, open_variant, record_of
from gmmvit_deploy.errors import GmmvitError, InputError
from gmmvit_deploy.export.gates import Gate
from gmmvit_deploy.export.variants import CALIBRATION_IMAGES, variants_from_bundle
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.progress import OnProgress, prefixed
from gmmvit_deploy.runner_name import Form
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes, open_images

__all__ = ["Graph", "convert_missing", "refuse_overlap"]

Graph = tuple[Precision, Form]
_NO_IMAGES = "needs images that set its ranges: type --calibration DATA, with images that are none of those of --data"
_STATIC_HOLDS = "no projection has to leave the static form for decisions to be kept"


def refuse_overlap(bundle: Bundle, calibration: str, gate: ImageStream) -> None:
    """Refuse calibration images that are also among those that judge.  Errors: InputError."""
    hashes = {digest for batch in gate for digest in image_hashes(batch.inputs)}
    images = open_images(bundle, calibration, limit=CALIBRATION_IMAGES)
    both = sum(digest in hashes for batch in images for digest in image_hashes(batch))
    if both:
        raise InputError(
            f"--calibration {calibration}: {both} of its {images.count} images are also among the {gate.handed_out} "
            "images of --data; int8 fits the images that calibrated it better than others, so they cannot judge it",
            hint="give --calibration images of training, and --data images that are in no other split",
        )


def convert_missing(
    bundle: Bundle,
    precisions: Sequence[Precision],
    calibration: str | None,
    on_progress: OnProgress,
    *,
    kept: float,
) -> dict[Graph, str]:
    """Write the graphs that the bundle lacks, and return why others could not be written: graph → the reason.

    kept: the share of decisions that a mixed graph keeps on calibration images that set no range.
    """
    why_not: dict[Graph, str] = {}
    for precision in precisions:
        try:
            if not forms_in(bundle, precision):
                variants_from_bundle(bundle, (precision,), on_progress=on_progress)
        except GmmvitError as exc:
            why_not[precision, ""] = str(exc)
    held = forms_in(bundle, "int8")
    for form in held:
        open_variant(bundle, "int8", form)  # one that is damaged or of another bundle is refused
    if calibration is None:
        why_not |= {("int8", form): _NO_IMAGES for form in ("static", "mixed") if form not in held}
    else:
        if "mixed" not in held:
            why_not["int8", "mixed"] = _mixed(bundle, calibration, on_progress, kept=kept)
        if "static" not in forms_in(bundle, "int8"):
            like = record_of(bundle, "int8", "mixed")
            why_not["int8", "static"] = _int8(bundle, "static", calibration, on_progress, like=like)
    if "dynamic" not in held:
        why_not["int8", "dynamic"] = _int8(bundle, "dynamic", None, on_progress)
    return {graph: why for graph, why in why_not.items() if why}


def _mixed(bundle: Bundle, calibration: str, on_progress: OnProgress, *, kept: float) -> str:
    """Convert with a gate, and return why that gave no mixed graph; "" if it gave one."""
    why = _int8(bundle, "mixed", calibration, on_progress, gate=Gate(keep_decisions=kept))
    return why or ("" if "mixed" in forms_in(bundle, "int8") else _STATIC_HOLDS)


def _int8(bundle: Bundle, form: Form, calibration: str | None, on_progress: OnProgress, **options: Any) -> str:
    """Write a graph in int8, and return why it could not be written."""
    report = prefixed(f"int8, {form}", on_progress)
    try:
        variants_from_bundle(bundle, ("int8",), calibration, on_progress=report, **options)
    except GmmvitError as exc:
        return str(exc)
    return ""
