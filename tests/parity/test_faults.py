"""Parity detects every fault, in the right check and with its reason."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from gmmvit_cli.main import app
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.golden import GoldenSet
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.demo.models import save_checkpoint
from gmmvit_deploy.errors import BundleError
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.graphs.constants import ConstantRecord, bytes_of_array
from gmmvit_deploy.images import spec as contract
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference import openvino_kernels, preprocess
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.pit import PiTSpec
from gmmvit_deploy.models.folding.fold import fold
from gmmvit_deploy.models.specs import MaskSpec
from gmmvit_deploy.parity._constants import check_constants
from gmmvit_deploy.parity._image_mistakes import pixel_mistakes
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.reference import Reference
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.parity.suspects import explain, suspects
from gmmvit_deploy.runtimes.runners.eager import EagerRunner
from gmmvit_deploy.runtimes.runners.open import open_runners
from tests.conftest import photo_pixels
from tests.inference.test_preprocess import encoded, photo
from tests.parity import faults
from tests.parity.faults import Altered, each_matrix, rebuilt
from tests.random_bundles import random_vit
from tests.runtimes.kernels.test_masked_attention import needs_kernel


def test_exchanged_classes_are_named_only_if_they_explain_the_difference() -> None:
    trained = np.random.default_rng(0).standard_normal((6, 1000))
    reference: Any = SimpleNamespace(logits=lambda inputs: (trained, None))
    labels = tuple(map(str, range(1000)))
    exchanged, off = trained[:, [1, 0, *range(2, 1000)]], trained + (np.arange(1000) == 7)

    def cause(logits: np.ndarray, limit: float, labels: tuple[str, ...]) -> str:
        return explain(bundle, reference, np.zeros(6), logits, limit, labels=labels, mistakes=())

    bundle: Any = None
    assert cause(exchanged, 0.01, labels) == "the class '0' has the logits of '1'; the class '1' has the logits of '0'"
    assert cause(exchanged, 0.01, ()) == ""  # features have no classes
    assert cause(off, 0.95, labels) == ""  # among 1,000 classes, another lies within a wide limit by chance


def failed_checks(report: ParityReport) -> set[str]:
    every = [*report.checks, *(check for runner in report.runners for check in runner.checks)]
    return {check.name for check in every if check.verdict == "failed"}


@dataclass(frozen=True)
class Judged:
    """The command line's report of a bundle, and its exit status."""

    status: int
    report: dict[str, Any]

    @property
    def checks(self) -> dict[str, dict[str, Any]]:
        return {check["name"]: check for check in [*self.report["checks"], *self.report["runners"][0]["checks"]]}

    @property
    def failed(self) -> set[str]:
        return {name for name, check in self.checks.items() if check["verdict"] == "failed"}


def judged(bundle: Bundle, *options: str | Path) -> Judged:
    answer = CliRunner().invoke(app, ["parity", str(bundle.path), "--json", *map(str, options)])
    assert answer.stdout, answer.exception
    return Judged(answer.exit_code, json.loads(answer.stdout))


IN_THE_GRAPH = {
    "1/√d missing": ("vit_gmm", faults.scale_to_the_power(0), "1/√d missing", "blocks.0"),
    "closed form for stored base": ("vit_gmm_256_tokens", faults.closed_form, "closed-form Gaussian mask", "blocks.0"),
    "mask shifted": ("vit_gmm", each_matrix(lambda m: m.roll(1, -2)), "shifted by one token, down", "blocks.0"),
    "class row masked": ("pit_gmm", each_matrix(faults.class_row_masked), "class token's row masked", "stages.0.0"),
    "bias without shift mask": (
        "swin_gmm",
        faults.without_shift_mask,
        "position bias without the shift mask",
        "stages.0.blocks.1",
    ),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("fault", IN_THE_GRAPH)
def test_wrong_constants(fault: str, tensor_bundles: dict[str, Bundle], tmp_path: Path) -> None:
    name, change, reason, first = IN_THE_GRAPH[fault]
    broken = rebuilt(tensor_bundles[name], tmp_path / "bundle", change)
    judgement = judged(broken, "--localize")
    assert judgement.status == 1
    assert {"constants", "numeric", "localize"} <= judgement.failed
    assert "preprocessing" not in judgement.failed
    explained = judgement.checks["numeric"]["reasons"][-1]
    assert reason in explained
    # the first block with the fault in it, and not the embedding before
    assert judgement.checks["localize"]["details"]["first"] == first


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("vit_gmm", faults.set_on(nn.LayerNorm, "eps", 1e-6), "epsilon of 1e-6"),
        ("swin_plain", faults.set_on(nn.GELU, "approximate", "tanh"), "tanh approximation"),
    ],
)
def test_wrong_operators(
    name: str, change: faults.ModelChange, reason: str, tensor_bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    judgement = judged(rebuilt(tensor_bundles[name], tmp_path / "bundle", change), "--localize")
    assert judgement.status == 1
    assert judgement.failed == {"numeric", "localize"}
    assert reason in judgement.checks["numeric"]["reasons"][-1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "mistake", "change"),
    [
        ("deepvit_patch", "head mixing transposed", faults.mixing_transposed("after")),
        ("rmt_tiny_like", "rotary position embedding left out", faults.without_rotation),
        ("eanet_transformer", "the second memory of the token transformers read without its strides", None),
        ("vp_deepvit", "the head mixing transposed", faults.mixing_transposed("after")),
        ("vp_cait", "the class token added to the keys of the class blocks, or left out of the keys", None),
        ("sl_cait", "head mixing before softmax transposed", faults.mixing_transposed("before")),
        ("vp_spt_lsa", "the scores divided by the learned temperature", faults.temperatures_inverted),
    ],
)
def test_a_mistake_of_each_other_family(
    name: str,
    mistake: str,
    change: faults.ModelChange | None,
    tensor_bundles: dict[str, Bundle],
    tmp_path: Path,
) -> None:
    """change: the mistake, made apart from the code that names it; None makes it by that code."""
    made = change or faults.usual_mistake(mistake)
    judgement = judged(rebuilt(tensor_bundles[name], tmp_path / "bundle", made))
    assert judgement.status == 1
    assert f"likely cause: {mistake}; " in judgement.checks["numeric"]["reasons"][-1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "reason"), [("mean and std", "mean and std of svhn"), ("channels", "BGR")], ids=["mean", "BGR"]
)
def test_wrong_normalisation_in_the_graph(fault: str, reason: str, bundle: Bundle, tmp_path: Path) -> None:
    if fault == "channels":
        broken = faults.channels_reversed(bundle, tmp_path / "bundle")
    else:
        other = DATASETS["svhn"]
        how = replace(bundle.manifest.image, mean=other.mean, std=other.std)
        broken = rebuilt(bundle, tmp_path / "bundle", lambda model: None, preprocessing=how)
    judgement = judged(broken)
    assert judgement.status == 1
    assert {"preprocessing", "numeric"} <= judgement.failed
    assert "constants" not in judgement.failed
    assert reason in judgement.checks["preprocessing"]["reasons"][0]
    assert reason in judgement.checks["numeric"]["reasons"][-1]


def _resized_otherwise(image: Any, *, height: int, width: int, **_: object) -> np.ndarray:
    return np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.NEAREST))


def test_another_preprocessing_where_a_bundle_is_opened(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "pixels_from_image", _resized_otherwise)
        with pytest.raises(BundleError, match=r"preprocessing: the pixels of reference image 1 differ from the pixels"):
            open_bundle(bundle.path)
    right = contract.tensor_from_pixels
    monkeypatch.setattr(contract, "tensor_from_pixels", lambda *how: right(*how) * np.float32(1.01))
    with pytest.raises(BundleError, match="preprocessing: the normalised reference inputs differ from those at export"):
        open_bundle(bundle.path)


def labelled_by(bundle: Bundle, count: int = 80) -> ArrayImages:
    """Return images that PyTorch, and so a correct runner, classifies as their labels state.

    A network that is not trained gives most images one class: of many images, those of the rarest classes come first.
    """
    images = photo_pixels(4, 10 * count)
    answers = answers_of(bundle, images)
    chosen = np.sort(np.argsort(np.bincount(answers)[answers], kind="stable")[: count // 2])
    chosen = np.concatenate([chosen, np.setdiff1d(np.arange(len(images)), chosen)[: count - len(chosen)]])
    return ArrayImages("made up", images[chosen], answers[chosen], bundle.manifest.labels)


def answers_of(bundle: Bundle, images: np.ndarray) -> np.ndarray:
    with EagerRunner(bundle) as eager:
        return eager.rows(bundle.inputs_from_pixels(images)).argmax(1)


def class_folders(data: ArrayImages, out: Path) -> Path:
    for index in range(len(data)):
        path = out / data.classes[data.label(index)] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encoded(index))
    return out


def test_labels_permuted(bundle: Bundle, tmp_path: Path) -> None:
    data = class_folders(labelled_by(bundle), tmp_path / "images")
    right = judged(bundle, "--data", data)
    assert (right.status, right.checks["accuracy"]["details"]["top1"]["runner"]) == (0, 1.0)
    permuted = faults.with_labels(bundle, tmp_path / "bundle", [*bundle.manifest.labels[1:], bundle.manifest.labels[0]])
    judgement = judged(permuted, "--data", data)
    assert judgement.status == 1
    assert judgement.failed == {"accuracy"}
    assert "with the same labels in another order" in judgement.checks["accuracy"]["reasons"][-1]


def test_labels_file_that_is_not_the_manifests(bundle: Bundle, tmp_path: Path) -> None:
    reversed_labels = "".join(f"{label}\n" for label in reversed(bundle.manifest.labels))
    with pytest.raises(BundleError, match=r"expected the manifest's labels in labels.txt"):
        faults.with_file(bundle, tmp_path / "bundle", "labels.txt", reversed_labels.encode())


RUNNERS = {
    "mixes up rows": (lambda logits: logits[::-1], "batch invariance", "rows are mixed up at batch 2: row 0 got"),
    "right at batch 1 only": (lambda x: x[[0] * len(x)], "batch invariance", "rows are mixed up at batch 2: row 1 got"),
    "wrong at the largest batch": (lambda x: x + 1 if len(x) == 8 else x, "batch invariance", "'alone' at batch 8"),
    "rounds to fp16": (lambda x: x.astype(np.float16).astype(np.float32), "numeric", "logits rounded to float16"),
    "a little off": (lambda logits: logits + np.float32(2e-5), "numeric", "from PyTorch's float64 logits"),
    "classes reversed": (lambda logits: logits[:, ::-1], "decisions", "noise explains"),
    "not finite": (lambda logits: np.where(np.arange(10) == 3, np.nan, logits), "numeric", "are not finite"),
    "too few classes": (lambda logits: logits[:, :-1], "numeric", r"expected logits (15, 10), got (15, 9)"),
    "all zero": (np.zeros_like, "decisions", "noise explains"),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("fault", RUNNERS)
def test_wrong_runners(fault: str, bundle: Bundle) -> None:
    change, check, reason = RUNNERS[fault]
    with Altered(bundle, change) as runner:
        report = check_parity(bundle, [runner], ParityOptions(data=labelled_by(bundle, 12)))
    assert check in failed_checks(report), report.failures()
    assert any(reason in why for why in report.runners[0].check(check).reasons), report.failures()
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["verdict"] == "failed"


def test_a_model_whose_float32_is_no_reference(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from gmmvit_deploy.parity import reference

    def coarse(self: reference.Reference, inputs: np.ndarray, *, exact: bool) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            trained = self.model(self.tensors(inputs)).numpy()
        # As if the float64 logits came from another model.
        return {"logits": trained.astype(np.float64) * 1.01 if exact else trained}

    monkeypatch.setattr(reference.Reference, "answers", coarse)
    assert "float32 is too coarse for this model" in judged(bundle).checks["numeric"]["reasons"][0]


@pytest.mark.integration
def test_a_network_with_the_same_logits_for_every_image_proves_nothing(
    gmmvit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Before training, the weights of the classifier head can be zero: the logits are then its bias."""
    model = random_vit(depth=1)
    for _, head in model.classifier_heads():
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.normal_(head.bias)
    save_checkpoint(model, tmp_path / "vit.pth", epoch=0)
    bundle = tmp_path / "bundle"
    exported = gmmvit("export", tmp_path / "vit.pth", "-o", bundle, "--dataset", "cifar10")
    assert exported.returncode == 0, exported.stderr
    assert re.search(
        "WARNING +PyTorch's outputs are equal for all inputs, so that the comparison proves nothing", exported.stdout
    )
    judgement = judged(open_bundle(bundle))
    assert (judgement.status, judgement.failed) == (1, {"numeric"})
    (reason,) = judgement.checks["numeric"]["reasons"]
    assert reason.startswith("PyTorch's logits are equal for all inputs: they differ by at most 0 between inputs")


def test_faults_end_the_process_with_1(
    bundle: Bundle,
    tensor_bundles: dict[str, Bundle],
    tmp_path: Path,
    gmmvit: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    broken = rebuilt(tensor_bundles["vit_gmm"], tmp_path / "bundle", faults.scale_to_the_power(2))
    page = tmp_path / "report.html"
    answer = gmmvit("parity", broken.path, "--localize", "--report", page)
    assert answer.returncode == 1
    assert "numeric: likely cause: 1/√d applied twice; with this mistake, PyTorch gives the logits" in answer.stdout
    assert "failed: bundle: constants: model.onnx: blocks.0.attention: the mask in the graph differs" in answer.stdout
    assert answer.stdout.splitlines()[-1].startswith("FAILED: constants")
    assert "1/√d applied twice" in page.read_text()
    right = gmmvit("parity", bundle.path, "--json")
    assert right.returncode == 0
    assert json.loads(right.stdout)["verdict"] == "passed"


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["both_bundle", "features_bundle"])
def test_features_without_unit_length(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    bundle = request.getfixturevalue(kind)
    (record,) = [output for output in bundle.manifest.outputs if output.name == "features"]
    assert (record.pooling, record.unit_length) == ("mean of all tokens", True)
    lengths = np.linalg.norm(bundle.golden_rows()[1]["features"], axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=0, atol=1e-6)
    assert judged(bundle).status == 0
    result = judged(rebuilt(bundle, tmp_path / "fault", lambda model: setattr(model, "normalises", False)))
    assert "numeric" in result.failed
    assert "likely cause: features without unit length" in result.checks["numeric"]["reasons"][-1]


# ---- constants: the rounding of another processor is borne, and nothing more -----------------------------------------


def last_bit(values: np.ndarray) -> np.ndarray:
    return np.nextafter(values, np.float32(np.inf))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "kind", "change", "recorded", "reason"),
    [
        ("vit_gmm", "masks", last_bit, True, ""),
        (
            *("vit_gmm", "masks", lambda values: values * np.float32(1 + 1e-5), True),
            "model.onnx: blocks.0.attention: the mask in the graph differs from the mask folded here",
        ),
        ("swin_gmm", "biases", last_bit, True, "limit 0.00e+00"),
        ("vit_gmm", "masks", last_bit, False, "differs from the mask in the manifest: expected SHA-256"),
    ],
    ids=["rounded by another processor", "another mask", "a bias that folding only moves", "not the manifest's"],
)
def test_a_constant_that_is_not_the_folded_one_is_named(
    name: str,
    kind: str,
    change: Callable[[np.ndarray], np.ndarray],
    recorded: bool,
    reason: str,
    tensor_bundles: dict[str, Bundle],
    tmp_path: Path,
) -> None:
    """kind: of the first constant, which is changed.  recorded: whether the manifest has its hash."""
    bundle = tensor_bundles[name]
    first: ConstantRecord = getattr(bundle.manifest, kind)[0]
    proto = onnx.load(bundle.onnx_path)
    (tensor,) = (tensor for tensor in proto.graph.initializer if tensor.name == first.constant)
    values = change(numpy_helper.to_array(tensor)).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, tmp_path / bundle.onnx_path.name)
    sha256 = sha256_of_bytes(bytes_of_array(values))
    records = tuple(
        replace(record, constant_sha256=sha256) if recorded and record.constant == first.constant else record
        for record in getattr(bundle.manifest, kind)
    )
    changed = Bundle(path=tmp_path, manifest=replace(bundle.manifest, **{kind: records}))
    check = check_constants(changed, Reference(bundle))
    assert (check.verdict == "passed") == (not reason)
    assert reason in "".join(check.reasons[:1])


# ---- the inputs of our kernels ---------------------------------------------------------------------------------------


def wrong_entry(numbers: np.ndarray) -> np.ndarray:
    damaged = numbers.copy()
    damaged[0, np.abs(damaged[0]).argmax()] = 0
    return damaged


def heads_swapped(numbers: np.ndarray) -> np.ndarray:
    return numbers[[1, 0, *range(2, len(numbers))]]


@needs_kernel
@pytest.mark.first(1)
@pytest.mark.parametrize("damaged", [wrong_entry, heads_swapped])
def test_a_fault_in_a_mask(
    damaged: Callable[[np.ndarray], np.ndarray], tensor_bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged() -> ParityReport:
        with open_runners(["openvino", "openvino+kernels"], tensor_bundles["vit_gmm"]) as runners:
            return check_parity(tensor_bundles["vit_gmm"], runners, ParityOptions(localize=True))

    before = judged()
    assert before.passed, before.failures()
    prepare: Callable[..., Any] = openvino_kernels.prepared_mask
    seen: list[bytes] = []

    def broken(mask: np.ndarray, arithmetic: Any) -> Any:
        """Damage the second mask only, however often it is prepared."""
        prepared = prepare(mask, arithmetic)
        if mask.tobytes() not in seen:
            seen.append(mask.tobytes())
        if seen.index(mask.tobytes()) != 1:
            return prepared
        return replace(prepared, numbers=np.ascontiguousarray(damaged(prepared.numbers)))

    monkeypatch.setattr(openvino_kernels, "prepared_mask", broken)
    report = judged()
    plain, ours = report.runners
    assert [check.verdict for check in report.checks] == ["passed", "passed"]
    assert plain.verdict == "passed", report.failures()
    assert ours.check("numeric").verdict == "failed"
    assert ours.check("localize").details["first"] == "blocks.1"
    assert "with our kernels" in ours.check("localize").details["graph"]
    assert f"{ours.runner.name}: localize: blocks.1: its output differs" in "".join(report.failures())
    assert ours.provenance["graph SHA-256"] != before.runners[1].provenance["graph SHA-256"]


# ---- a mask without influence on the logits --------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.integration
def test_mistakes_in_a_dead_mask_are_not_suspects(tmp_path: Path) -> None:
    """The only mask of a PiT with a single attention is dead."""
    spec = PiTSpec(
        image_size=16, patch_size=2, classes=5, dim=32, depths=(1,), heads=(2,), head_dim=16, mlp_dims=(32,),
        mask=MaskSpec(kind="gmm", kernels=3),
    )  # fmt: skip
    checkpoint = tmp_path / "weights.safetensors"
    checkpoint.write_bytes(bytes_from_model(model_from_spec(spec).eval()))
    options = ExportOptions(input_kind="tensor", max_batch=4)
    bundle = bundle_from_checkpoint(checkpoint, tmp_path / "bundle", options)
    assert bundle.manifest.masks == ()
    reference = Reference(bundle)
    checked = check_constants(bundle, reference)
    assert checked.summary == "the folded model has no masks and biases, so the graph has no constants to compare"
    inputs, _ = bundle.golden()
    trained, _ = reference.logits(inputs)
    given = dict(suspects(bundle, reference, inputs))
    assert not any(np.array_equal(logits, trained) for logits in given.values())
    assert "no mask at all" not in given
    assert "masks transposed" not in given
    assert "the class token's row masked with zeros" in given


@pytest.mark.nightly
@pytest.mark.integration
def test_a_mistake_in_the_masks_of_the_graph_is_named(tensor_bundles: dict[str, Bundle]) -> None:
    bundle = tensor_bundles["pit_gmm"]
    reference = Reference(bundle)
    inputs, _ = bundle.golden()
    model = fold(reference.model).model
    for layer in ("stages.0.0", "stages.1.0", "stages.1.1"):
        mask = model.get_submodule(layer).attention.scores.before.mask
        mask.constant = mask.constant.roll(1, -2)
    with torch.inference_mode():
        shifted = model(reference.tensors(inputs)).numpy()
    name = "masks shifted by one token, down, only in the masks of the graph"
    assert explain(bundle, reference, inputs, shifted, 1e-5) == name


# ---- images that are resized, fitted or normalised otherwise ---------------------------------------------------------


STRETCH = ImageSpec(height=24, width=32, channels=3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))
CENTER = replace(STRETCH, resize="center-bicubic", crop_pct=0.9)
BORDER = replace(STRETCH, resize="border-bicubic", crop_pct=0.94)
IMAGES = tuple(
    encoded(photo(*size, mode), "PNG")
    for size, mode in (((60, 41), "RGB"), ((25, 70), "L"), ((32, 24), "RGB"), ((16, 12), "P"))
)


def names_of(images: tuple[bytes, ...], recorded: ImageSpec, pixels: np.ndarray) -> list[str]:
    """Return the names of all mistakes that give ``pixels`` instead of the pixels of ``recorded``."""
    nothing = np.zeros(0)
    golden = GoldenSet(
        inputs=nothing,
        tensors=nothing,
        logits=nothing,
        images=images,
        image_pixels=np.stack([recorded.pixels_from_bytes(image) for image in images]),
        image_logits=nothing,
    )
    return [name for name, made in pixel_mistakes(golden, recorded) if np.array_equal(made, pixels)]


@pytest.mark.parametrize(
    ("recorded", "changes", "name"),
    [
        (STRETCH, {"resize": "stretch-bicubic"}, "resized with bicubic instead of bilinear"),
        (
            STRETCH,
            {"resize": "center-bilinear", "crop_pct": 0.875},
            "fitted by center with crop_pct 0.875 instead of stretch",
        ),
        (CENTER, {"crop_pct": 1.0}, "fitted by center with crop_pct 1 instead of center with crop_pct 0.9"),
        (
            CENTER,
            {"resize": "stretch-bilinear", "crop_pct": 1.0},
            "resized with bilinear instead of bicubic, fitted by stretch instead of center with crop_pct 0.9",
        ),
        (
            BORDER,
            {"mean": (0.0, 0.0, 0.0)},
            "fitted by border with crop_pct 0.94, padded with black instead of border with crop_pct 0.94",
        ),
    ],
)
def test_a_mistake_is_named(recorded: ImageSpec, changes: dict[str, Any], name: str) -> None:
    made = replace(recorded, **changes)
    names = names_of(IMAGES, recorded, np.stack([made.pixels_from_bytes(image) for image in IMAGES]))
    assert names[0] == name


@pytest.mark.parametrize("channels", [1, 3])
def test_other_filters_of_pillow_are_named(channels: int) -> None:
    recorded = replace(STRETCH, channels=channels, mean=(0.5,) * channels, std=(0.2,) * channels)
    made = []
    for image in IMAGES:
        with Image.open(io.BytesIO(image)) as opened:
            resized = opened.convert(recorded.mode).resize((32, 24), Image.Resampling.LANCZOS)
            made.append(np.asarray(resized).reshape(recorded.pixels_shape))
    assert names_of(IMAGES, recorded, np.stack(made))[0] == "resized with lanczos instead of bilinear"
