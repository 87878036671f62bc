"""Labels show what no comparison with PyTorch can: PyTorch itself gets wrong pixels, or labels in another order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.inference.labels import LabelSet
from gmmvit_deploy.parity._multi_label import MultiLabelAccuracy
from gmmvit_deploy.parity._single_label import Accuracy
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.runtimes.runners.eager import EagerRunner
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.conftest import cifar_options, golden, once
from tests.parity.test_check import SCHEMA
from tests.parity.test_statistics import SAME

COUNT = 128
PIXELS = np.random.default_rng(4).integers(0, 256, (COUNT, 5, 7, 3), dtype=np.uint8).repeat(8, axis=1).repeat(8, axis=2)


@pytest.fixture(scope="module")
def sensitive(shared: Path, bundle: Bundle) -> Bundle:
    """``bundle`` with another head, so that every class is predicted and depends on the preprocessing."""

    def make(out: Path) -> None:
        image = bundle.manifest.image
        with EagerRunner(bundle) as eager:
            logits = eager.rows(np.stack([image.pixels_from_image(Image.fromarray(pixels)) for pixels in PIXELS]))
        saved = torch.load(golden("vit_gmm").path, weights_only=True)
        weights = saved["model_state_dict"]
        scale = torch.from_numpy(logits.std(0))
        weights["mlp_head.1.weight"] /= scale[:, None]
        weights["mlp_head.1.bias"] = (weights["mlp_head.1.bias"] - torch.from_numpy(logits.mean(0))) / scale
        torch.save(saved, out.with_suffix(".pth"))
        bundle_from_checkpoint(out.with_suffix(".pth"), out, cifar_options())

    return once(shared / "sensitive", make)


def labelled(bundle: Bundle, colours: slice = slice(None), **changes: object) -> ArrayImages:
    """Return images with the classes that PyTorch gives with another preprocessing, as if it was trained so."""
    image = replace(bundle.manifest.image, **changes)
    pixels = np.stack([image.pixels_from_image(Image.fromarray(pixels)) for pixels in PIXELS])[..., colours]
    with EagerRunner(bundle) as eager, torch.inference_mode():
        labels = eager.model(torch.from_numpy(image.tensor_from_pixels(pixels))).argmax(1).numpy()
    return ArrayImages("made up", PIXELS, labels, bundle.manifest.labels)


def checked(bundle: Bundle, data: ArrayImages, expected: float | None = None) -> ParityReport:
    with OnnxRuntimeRunner(bundle) as runner:
        report = check_parity(bundle, [runner], ParityOptions(data=data, expected_accuracy=expected, gate=0.9))
    jsonschema.validate(report.to_json(), SCHEMA)
    return report


IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("expected", "colours", "changes", "name"),
    [
        (
            0.93,
            slice(None),
            IMAGENET,
            "100.0% normalised with the mean and std of ImageNet (--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225)",
        ),
        (
            None,
            slice(None),
            {"resize": "center-bicubic", "crop_pct": 0.875},
            "100.0% resized by center-bicubic, crop_pct 0.875 (--resize center-bicubic --crop-pct 0.875)",
        ),
        (None, slice(None, None, -1), {}, "100.0% channels in the order BGR"),
    ],
    ids=["normalisation", "resize rule", "channels"],
)
def test_the_preprocessing_of_training_is_named(
    expected: float | None, colours: slice, changes: dict[str, object], name: str, sensitive: Bundle
) -> None:
    report = checked(sensitive, labelled(sensitive, colours, **changes), expected)
    accuracy = report.runners[0].check("accuracy")
    verdict = "undecided" if expected is None else "failed"
    assert (report.verdict, accuracy.verdict) == (verdict, verdict)
    assert {check.name for check in report.runners[0].checks if check.verdict == verdict} == {"accuracy"}
    assert "the preprocessing is probably wrong" in accuracy.reasons[-1]
    assert f"with the bundle's preprocessing, and {name}, p = " in accuracy.reasons[-1]
    assert expected is None or "expected 93.00%" in accuracy.reasons[0]


def test_the_right_preprocessing_passes(sensitive: Bundle) -> None:
    """Also if labels are wrong at random: no preprocessing helps."""
    data = labelled(sensitive)
    noisy = np.array([data.label(index) for index in range(COUNT)])
    noisy[::4] = (noisy[::4] + np.arange(COUNT // 4)) % 10
    for each, expected in ((data, 0.93), (ArrayImages("noisy", PIXELS, noisy, data.classes), None)):
        report = checked(sensitive, each, expected)
        assert report.passed, report.runners[0].check("accuracy")


def test_an_expected_accuracy_without_images_fails(bundle: Bundle) -> None:
    with OnnxRuntimeRunner(bundle) as runner:
        report = check_parity(bundle, [runner], ParityOptions(expected_accuracy=0.93))
    jsonschema.validate(report.to_json(), SCHEMA)
    assert report.failures() == [
        "onnxruntime: accuracy: --expect-accuracy 0.93: PyTorch's accuracy was not measured: no labelled images were "
        "given; add --data"
    ]
    with pytest.raises(InputError, match=r"expected_accuracy: expected a share of the images, such as 0.97, got 93"):
        ParityOptions(expected_accuracy=93)


@pytest.mark.parametrize("exchanged", [(1, 0, 2, 3, 4), (1, 2, 3, 4, 0)], ids=["two labels", "all labels"])
def test_labels_that_were_exchanged_are_named(exchanged: tuple[int, ...]) -> None:
    """PyTorch is right on nine images in ten; two exchanged labels leave 54 %."""
    true = np.arange(500) % 5
    answers = np.where(np.arange(500) % 50 < 45, true, (true + 2) % 5)
    for order, verdict in ((range(5), "undecided"), (exchanged, "failed")):
        collected = Accuracy([f"label {index}" for index in order], SAME)
        logits = np.eye(5)[answers]
        collected.add(list(np.array(order)[true]), logits, logits)
        check = collected.check(0.999)
        assert check.verdict == verdict
    (cause,) = check.reasons  # and not that the images are too few for the gate
    assert "the labels are probably permuted: PyTorch classifies" in cause
    assert "and 90.0% with the same labels in another order: PyTorch calls the images of label" in cause


@pytest.mark.parametrize("skew", [1, 9], ids=["even", "one class on nine images of ten"])
def test_labels_that_pytorch_cannot_tell_from_chance_pass_no_gate(skew: int) -> None:
    """A network that was never trained, or labels of other images: the runner is right exactly as often."""
    random = np.random.default_rng(1)
    shares = np.array([skew, *[1 / (11 - skew)] * 9])
    labels, answers = (random.choice(10, 600, p=shares / shares.sum()) for _ in range(2))
    single = Accuracy([f"label {index}" for index in range(10)], SAME)
    multi = MultiLabelAccuracy(LabelSet(labels=tuple("abcd"), task="multi-label", thresholds=(0.5,) * 4), SAME)
    sets = np.unpackbits(np.stack([labels, answers]).astype(np.uint8)[..., None], axis=2)[..., 4:]
    logits = np.eye(10)[answers]
    single.add(labels.tolist(), logits, logits)
    multi.add([tuple(map(int, np.flatnonzero(row))) for row in sets[0]], sets[1] * 2.0 - 1, sets[1] * 2.0 - 1)
    for accuracy in (single, multi):
        check = accuracy.check(0.999)
        assert check.verdict == "undecided"
        (cause,) = check.reasons
        assert "not clearly more than the" in cause
        assert "too few" not in cause
        assert "--keep-decisions" in cause
