"""The preprocessing contract: raw bytes → pixels → tensor → logits, wherever that happens.

    here            bytes → pixels → tensor: what they were at export (checked whenever a bundle is opened, too)
    in the graph    pixels → tensor: the tensor inside ``model.onnx``, where the graph normalises
    on the server   bytes → pixels or tensor of its preprocessing model, bytes → logits of its ensemble

Where something differs, the usual mistakes are tried, and the one that gives the same is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.artifacts import Bundle, Preprocessing
from gmmvit_deploy.datasets import DATASETS
from gmmvit_deploy.golden import GoldenSet, preprocessing_problem
from gmmvit_deploy.graphs.normalisation import normalised_in_graph
from gmmvit_deploy.parity.measures import distance
from gmmvit_deploy.parity.verdict import Check
from gmmvit_deploy.preprocess import tensor_from_pixels
from gmmvit_deploy.runners.runner import Runner, Served
from gmmvit_deploy.tolerances import Limit

__all__ = ["Sample", "check_preprocessing", "normalisations"]

NAME = "preprocessing"
_MOST_SENT = 16
_TENSOR_ROUNDING = 4 * 2.0**-23
"""Over the largest value: two programs may round a subtraction and a division once each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A real image as a client sends it.

    pixels: uint8 (S, S, 3), decoded here.  exact: PyTorch's float64 logits (C,) for them.
    """

    where: str
    encoded: bytes
    pixels: NDArray[Any]
    exact: NDArray[Any]


def check_preprocessing(bundle: Bundle, runner: Runner, limit: Limit, *, samples: Sequence[Sample] = ()) -> Check:
    """limit: of the runner's logits.  samples: real images, for a server.  Errors: whatever the server raises."""
    how = bundle.manifest.preprocessing
    if how is None:
        why = "the bundle does not say how images become its input"
        return Check(name=NAME, verdict="skipped", says=why, reasons=(why,))
    golden = bundle.golden_set()
    seen = [f"{len(golden.images)} images decode here as at export"]
    reasons = []
    if problem := preprocessing_problem(golden, bundle.manifest.spec.image_size, how.mean, how.std):
        reasons.append(f"here: {problem}")
    if bundle.manifest.input_kind == "pixels" and runner.graph is not None:
        seen.append("the graph normalises as the manifest says")
        reasons += _graph_problems(runner.graph.path, golden, how)
    if runner.server is not None:
        sent = min(len(samples), _MOST_SENT)
        seen.append(f"the server makes the same of them, and PyTorch's logits of {sent} raw images of the data")
        reasons += _server_problems(runner.server, bundle, golden, how, limit, runner.max_batch)
        reasons += _sample_problems(runner.server, samples, limit)
    return Check(
        name=NAME,
        verdict="failed" if reasons else "passed",
        says="; ".join(seen) if not reasons else f"{len(reasons)} things differ from the contract",
        reasons=tuple(reasons),
        details={"images": len(golden.images)},
    )


def normalisations(how: Preprocessing) -> Iterator[tuple[str, Preprocessing]]:
    """(words, mean and std) that a model is easily given in place of its own."""
    known = {name: Preprocessing(mean=found.mean, std=found.std) for name, found in DATASETS.items()}
    known["ImageNet"] = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    known["0.5, 0.5, 0.5"] = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    known["nothing, values in [0, 1]"] = Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    for name, other in known.items():
        if other != how:
            yield f"normalised with the mean and std of {name}", other


def _graph_problems(path: Path, golden: GoldenSet, how: Preprocessing) -> list[str]:
    pixels = np.concatenate([golden.inputs, golden.image_pixels])
    found = normalised_in_graph(path, pixels)
    if found is None:
        return [f"{path.name}: nothing in it turns pixels into a tensor; it must normalise"]
    return [f"{path.name}: {why}" for why in _tensor_problem(found, pixels, how)]


def _server_problems(
    server: Served, bundle: Bundle, golden: GoldenSet, how: Preprocessing, limit: Limit, max_batch: int
) -> list[str]:
    served = server.connection.model(server.preprocess)
    wanted = {"image_size": bundle.manifest.spec.image_size, "mean": list(how.mean), "std": list(how.std)}
    said = {name: (served.preprocessing or {}).get(name) for name in wanted}
    reasons = [
        f"{server.preprocess} on the server has {name} {said[name]}, the bundle {wanted[name]}"
        for name in wanted
        if said[name] != wanted[name]
    ]
    bytes_of = np.array([[image] for image in golden.images], dtype=np.object_)
    size = max(1, min(served.max_batch, max_batch))
    answers: dict[str, list[NDArray[Any]]] = {"made": [], "logits": []}
    for start in range(0, len(bytes_of), size):
        part = bytes_of[start : start + size]
        kind = bundle.manifest.input_kind
        answers["made"].append(server.connection.infer(server.preprocess, "IMAGE", part, output=kind))
        answers["logits"].append(server.connection.infer(server.ensemble, "IMAGE", part))
    made, logits = (np.concatenate(parts) for parts in answers.values())
    where = f"{server.preprocess} on the server"
    if bundle.manifest.input_kind == "pixels":
        reasons += [f"{where}: {why}" for why in _pixel_problem(made, golden)]
    else:
        reasons += [f"{where}: {why}" for why in _tensor_problem(made, golden.image_pixels, how)]
    largest = distance(logits, golden.image_logits)
    if not largest <= 2 * limit.largest:  # the stored logits have their own rounding
        reasons.append(
            f"{server.ensemble} on the server: raw images give logits that are {largest:.3g} from PyTorch's; "
            f"{2 * limit.largest:.3g} is allowed"
        )
    return reasons


def _sample_problems(server: Served, samples: Sequence[Sample], limit: Limit) -> list[str]:
    """One request an image: JPEGs of any size, which the golden images leave out."""
    reasons = []
    samples = samples[:_MOST_SENT]
    for sample in samples:
        image = np.array([[sample.encoded]], dtype=np.object_)
        found = server.connection.infer(server.ensemble, "IMAGE", image)[0]
        largest = distance(found, sample.exact)
        if not largest <= limit.largest:
            reasons.append(
                f"{sample.where}: its bytes give logits on the server that are {largest:.3g} from PyTorch's on the "
                f"pixels decoded here; {limit.largest:.3g} is allowed"
            )
    return reasons[:1] + ([f"and {len(reasons) - 1} of {len(samples)} images more"] if len(reasons) > 1 else [])


def _pixel_problem(found: NDArray[Any], golden: GoldenSet) -> list[str]:
    wanted = golden.image_pixels
    if found.shape == wanted.shape and np.array_equal(found, wanted):
        return []
    if found.shape != wanted.shape:
        return [f"pixels {wanted.shape} were wanted, found {found.shape}"]
    apart = np.abs(found.astype(int) - wanted)
    what = f"{np.count_nonzero(apart)} values of pixels differ, by up to {apart.max()}"
    return [f"{what}{_named(name for name, made in _other_pixels(golden) if np.array_equal(made, found))}"]


def _other_pixels(golden: GoldenSet) -> Iterator[tuple[str, NDArray[Any]]]:
    """What the usual mistakes make of the golden images."""
    import io

    from PIL import Image

    side = golden.image_pixels.shape[1]
    yield "BGR for RGB", golden.image_pixels[..., ::-1]
    for resampling in Image.Resampling:
        if resampling is not Image.Resampling.BILINEAR:
            made = [
                np.asarray(Image.open(io.BytesIO(image)).convert("RGB").resize((side, side), resampling))
                for image in golden.images
            ]
            yield f"resized with {resampling.name.lower()} instead of bilinear", np.stack(made)


def _tensor_problem(found: NDArray[Any], pixels: NDArray[Any], how: Preprocessing) -> list[str]:
    wanted = tensor_from_pixels(pixels, how.mean, how.std)
    if _same_tensor(found, wanted):
        return []
    if found.shape != wanted.shape:
        return [f"a tensor {wanted.shape} was wanted, found {found.shape}"]
    what = f"the normalised tensor differs by up to {np.abs(found - wanted).max():.3g}"
    return [f"{what}{_named(name for name, made in _other_tensors(pixels, how) if _same_tensor(found, made))}"]


def _other_tensors(pixels: NDArray[Any], how: Preprocessing) -> Iterator[tuple[str, NDArray[Any]]]:
    yield "BGR for RGB", tensor_from_pixels(pixels[..., ::-1], how.mean, how.std)
    for name, other in normalisations(how):
        yield name, tensor_from_pixels(pixels, other.mean, other.std)


def _same_tensor(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return found.shape == wanted.shape and bool(
        np.abs(found - wanted).max() <= _TENSOR_ROUNDING * max(1.0, float(np.abs(wanted).max()))
    )


def _named(candidates: Iterator[str]) -> str:
    name = next(candidates, "")
    return f": it is {name}" if name else ""
