"""Convert what a bundle lacks: each precision, and int8 in each of its three forms.

    static   activations have ranges, which calibration images set; for every runtime
    dynamic  activations are quantised while the network runs; for OpenVINO, needs no images
    mixed    as many projections as a gate needs are in the dynamic form or in float32; for OpenVINO

A bundle holds one int8 graph. If it has one, no other form is tried. Otherwise each form is converted in a copy of the
bundle, and the chosen one's graph can then be written into the bundle (`export.variants.variant_from_copy`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import MANIFEST_FILE, Bundle, open_bundle
from gmmvit_deploy.bundle.gates import Gate
from gmmvit_deploy.bundle.variants import first_variant, onnx_files, record_of
from gmmvit_deploy.errors import BundleError, GmmvitError, InputError
from gmmvit_deploy.export.variants import CALIBRATION_IMAGES, variants_from_bundle
from gmmvit_deploy.parity.inputs import ImageStream
from gmmvit_deploy.precision import Precision
from gmmvit_deploy.progress import OnProgress, prefixed
from gmmvit_deploy.runner_name import FORMS, Form
from gmmvit_deploy.runtimes.programs.image_batches import image_hashes, open_images

__all__ = ["Graph", "Graphs", "converted", "form_of", "refuse_overlap"]

Graph = tuple[Precision, Form]
_NO_IMAGES = "needs images that set its ranges: type --calibration DATA, with images that are none of those of --data"


@dataclass(slots=True)
class Graphs:
    """The graphs to try.

    bundles: graph → the bundle, or a copy of it, that holds it.  left_out: graph → why there is none.
    """

    bundles: dict[Graph, Bundle] = field(default_factory=dict)
    left_out: dict[Graph, str] = field(default_factory=dict)


def form_of(bundle: Bundle) -> Form:
    """Return the form of a bundle's int8 graph for CPUs.  Errors: BundleError when the bundle has none."""
    record = record_of(bundle, "int8")
    if record is None:
        raise BundleError(f"{bundle.path}: it has no int8 graph")
    return (record.cpu or record).form


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


def converted(
    bundle: Bundle,
    precisions: Sequence[Precision],
    calibration: str | None,
    folder: Path,
    on_progress: OnProgress,
    *,
    kept: float,
) -> Graphs:
    """Convert each precision that the bundle lacks, and each form of int8 if it has no int8 graph.

    precisions: those whose graphs are written into the bundle.  folder: a temporary folder for copies with int8 graphs.
    kept: the share of decisions that a mixed graph keeps on calibration images that set no range.
    """
    graphs = Graphs(bundles={("fp32", ""): bundle})
    for precision in precisions:
        try:
            _require(bundle, precision, on_progress)
            graphs.bundles[precision, ""] = bundle
        except GmmvitError as exc:
            graphs.left_out[precision, ""] = str(exc)
    _add_int8(bundle, graphs, calibration, folder, on_progress, kept=kept)
    return graphs


def _require(bundle: Bundle, precision: Precision, on_progress: OnProgress) -> None:
    if not any((bundle.path / name).exists() for name in onnx_files(precision)):
        variants_from_bundle(bundle, (precision,), on_progress=on_progress)


def _add_int8(
    bundle: Bundle, graphs: Graphs, calibration: str | None, folder: Path, on_progress: OnProgress, *, kept: float
) -> None:
    def try_form(form: Form, images: str | None, gate: Gate | None = None, like: Bundle | None = None) -> Bundle | None:
        """Convert a copy of the bundle, and return it."""
        try:
            copy = _copy(bundle, folder / form)
            report = prefixed(f"int8, {form}", on_progress)
            variants_from_bundle(copy, ("int8",), images, gate=gate, like=like, on_progress=report)
            graphs.bundles.setdefault(("int8", form_of(copy)), copy)
            return copy
        except GmmvitError as exc:
            graphs.left_out["int8", form] = str(exc)
            return None

    if any((bundle.path / name).exists() for name in onnx_files("int8")):
        first_variant(bundle, "int8")  # one that is damaged or of another bundle is refused
        held = form_of(bundle)
        graphs.bundles["int8", held] = bundle
        why = f"the bundle holds int8 {held}; remove {bundle.path}/model.int8* to try every form"
        graphs.left_out |= {("int8", form): why for form in FORMS if form != held}
        return
    if calibration is None:
        graphs.left_out |= {("int8", "static"): _NO_IMAGES, ("int8", "mixed"): _NO_IMAGES}
    else:
        mixed = try_form("mixed", calibration, Gate(keep_decisions=kept))
        if mixed is not None and form_of(mixed) == "static":
            graphs.left_out["int8", "mixed"] = "no projection has to leave the static form for decisions to be kept"
        else:
            try_form("static", calibration, like=mixed)
    try_form("dynamic", None)


def _copy(bundle: Bundle, folder: Path) -> Bundle:
    """Return a copy of the bundle without its variants, by links to its files where the file system has them."""
    folder.mkdir()
    for name in (MANIFEST_FILE, *bundle.manifest.files):
        try:
            os.link(bundle.path / name, folder / name)
        except OSError:  # another file system
            shutil.copy2(bundle.path / name, folder / name)
    return open_bundle(folder)
