from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant, record_of
from gmmvit_deploy.errors import BundleError, ExportError, ImageError, InputError
from gmmvit_deploy.exporting import variants as module
from gmmvit_deploy.exporting.variants import variant_from_bundle, variants_from_bundle
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.graphs.roles import attentions_of
from gmmvit_deploy.runtimes.programs.image_batches import open_images

# Largest seen on vit_gmm, of the largest golden logit: fp16 3.1e-4, bf16 4.5e-3, int8 2.5e-2, fp8 4.4e-2.
LARGEST = {"fp16": 1e-3, "bf16": 1e-2, "int8": 6e-2, "fp8": 1e-1}


@pytest.fixture
def copied(bundle: Bundle, tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(bundle.path, tmp_path / "bundle"))


@pytest.mark.parametrize("precision", list(LARGEST))
def test_a_precision_is_recorded_whole(precision: str, precise_bundle: Bundle) -> None:
    variant = open_variant(precise_bundle, precision)
    record = variant.record
    assert record is not None
    assert record.onnx_sha256 == sha256_of_file(variant.path) == variant.sha256
    assert record.bundle_sha256 == precise_bundle.sha256
    assert 0 < record.golden["largest_rel"] < LARGEST[precision]
    heads = [(mask.layer, mask.head) for mask in record.masks]
    assert heads == [(mask.layer, head) for mask in precise_bundle.manifest.masks for head in range(3)]
    assert all(mask.flushed == mask.saturated == 0 < mask.largest_change for mask in record.masks)
    assert (record.calibration is None) == (precision in ("fp16", "bf16"))
    if record.calibration:
        assert record.calibration["images"] == 64
        assert len(record.calibration["sha256"]) == 64
        assert len(set(record.calibration["image_sha256"])) == 64
    proto = onnx.load(variant.path)
    onnx.checker.check_model(proto, full_check=True)
    for graph in (proto, onnx.load(precise_bundle.onnx_path, load_external_data=False)):
        assert graph.ir_version == onnx.helper.find_min_ir_version_for(list(graph.opset_import), ignore_unknown=True)
    attentions = attentions_of(ir.load(variant.path).graph)
    assert {attention.mask for attention in attentions} == set(record.constants.values())


@pytest.mark.nightly
def test_the_same_bundle_gives_the_same_bytes(copied: Bundle, precise_bundle: Bundle, calibration_images: Path) -> None:
    for precision in ("fp16", "int8"):
        data = open_images(copied, str(calibration_images), limit=64) if precision == "int8" else None
        made = variant_from_bundle(copied, precision, calibration=data)
        assert made.sha256 == open_variant(precise_bundle, precision, made.form).sha256


@pytest.mark.nightly
def test_the_recipe_of_a_record_gives_the_same_int8_graphs_without_a_search(
    copied: Bundle, precise_bundle: Bundle, calibration_images: Path
) -> None:
    variants_from_bundle(
        copied, ("int8",), str(calibration_images), 64, like=record_of(precise_bundle, "int8", "static")
    )
    for form in ("static", ""):
        made, known = (open_variant(each, "int8", form) for each in (copied, precise_bundle))
        assert made.sha256 == known.sha256
        assert made.record is not None
        assert made.record.calibration is not None
        assert len(made.record.calibration["tried"]) == 1


def test_fp32_is_the_bundle_itself(copied: Bundle) -> None:
    before = sorted(copied.path.rglob("*"))
    variant = variant_from_bundle(copied, "fp32")
    assert variant.path == copied.onnx_path
    assert variant.record is None
    assert sorted(copied.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda b: (b.path / "graphs/fp16.onnx").unlink(),
            "expected the graph graphs/fp16.onnx and its record graphs/fp16.json, got only one of them",
        ),
        (
            lambda b: (b.path / "graphs/fp16.json").unlink(),
            "expected the graph graphs/fp16.onnx and its record graphs/fp16.json, got only one of them",
        ),
        (lambda b: (b.path / "graphs/fp16.json").write_text("{}"), "expected the JSON record of a graph"),
        (lambda b: (b.path / "graphs/fp16.onnx").write_bytes(b"x"), "the file was changed or damaged"),
        (
            lambda b: shutil.copyfile(b.path / "graphs/bf16.json", b.path / "graphs/fp16.json"),
            "the file was changed or damaged",
        ),
    ],
)
def test_a_precision_that_is_not_whole(damage: object, message: str, precise_bundle: Bundle, tmp_path: Path) -> None:
    broken = open_bundle(shutil.copytree(precise_bundle.path, tmp_path / "b"))
    damage(broken)
    with pytest.raises(BundleError, match=message) as caught:
        open_variant(broken, "fp16")
    assert "gmmvit convert" in caught.value.hint


def test_a_precision_of_another_bundle(
    precise_bundle: Bundle, tensor_bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    shutil.copytree(tensor_bundles["vit_gmm"].path, tmp_path / "b")
    (tmp_path / "b/graphs").mkdir(exist_ok=True)
    for name in ("graphs/fp16.onnx", "graphs/fp16.json"):
        shutil.copyfile(precise_bundle.path / name, tmp_path / "b" / name)
    with pytest.raises(BundleError, match="expected a graph of the bundle"):
        open_variant(open_bundle(tmp_path / "b"), "fp16")


def test_calibration_belongs_to_the_quantised_precisions(copied: Bundle, calibration_images: Path) -> None:
    with pytest.raises(InputError, match="fp8 needs calibration images"):
        variant_from_bundle(copied, "fp8")
    with pytest.raises(InputError, match="fp16 does not use calibration images"):
        variant_from_bundle(copied, "fp16", calibration=open_images(copied, str(calibration_images), limit=4))


@pytest.mark.nightly
def test_logits_that_are_not_finite_are_not_written(copied: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(copied.path.rglob("*"))
    monkeypatch.setattr(module, "emulated_outputs", lambda *_, **__: (np.full((8, 10), np.nan, np.float32),))
    with pytest.raises(ExportError, match="the logits in fp16 are not finite"):
        variant_from_bundle(copied, "fp16")
    assert sorted(copied.path.rglob("*")) == before


class TestImages:
    """What ``--calibration`` takes."""

    def test_a_folder_is_decoded_as_the_server_decodes(self, bundle: Bundle, tmp_path: Path) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
        for number, image in enumerate(pixels):
            (tmp_path / str(number % 2)).mkdir(exist_ok=True)
            Image.fromarray(image).save(tmp_path / str(number % 2) / f"{number}.png")
        batches = list(open_images(bundle, str(tmp_path), limit=10, batch=2))
        assert [len(batch) for batch in batches] == [2, 2, 1]
        assert np.concatenate(batches).tobytes() == pixels[[0, 2, 4, 1, 3]].tobytes()

    def test_the_training_split_is_the_default(self, bundle: Bundle, tmp_path: Path) -> None:
        """So that gmmvit parity --data with the same words judges on other images."""

        def images(source: str) -> tuple[str, bytes]:
            opened = open_images(bundle, source, limit=3)
            return opened.source, np.concatenate(list(opened)).tobytes()

        assert images("digits") == images("digits#train")
        assert [images(f"digits{split}")[0] for split in ("", "#test")] == ["digits train", "digits test"]
        for number, split in enumerate(("test", "train")):
            (tmp_path / split / "cat").mkdir(parents=True)
            Image.new("RGB", (32, 32), (number, 0, 0)).save(tmp_path / split / "cat" / "x.png")
        for source in (str(tmp_path), f"folder:{tmp_path}"):
            assert images(source) == (str(tmp_path / "train"), bytes([1, 0, 0]) * 32**2)
        (tmp_path / "train" / "cat" / "x.png").rename(tmp_path / "train" / "x.png")
        (tmp_path / "train" / "cat").rmdir()
        (tmp_path / "test").rename(tmp_path / "bus")
        for source in (str(tmp_path), f"folder:{tmp_path}"):  # a class called train
            assert images(source) == (str(tmp_path), bytes([0, 0, 0]) * 32**2 + bytes([1, 0, 0]) * 32**2)

    def test_a_limit_is_spread_over_what_is_there(self, bundle: Bundle, tmp_path: Path) -> None:
        pixels = np.arange(100, dtype=np.uint8)[:, None, None, None] * np.ones((32, 32, 3), np.uint8)
        np.save(tmp_path / "x.npy", pixels)
        images = open_images(bundle, str(tmp_path / "x.npy"), limit=5)
        assert np.concatenate(list(images))[:, 0, 0, 0].tolist() == [0, 25, 50, 74, 99]

    def test_pixels_are_normalised_for_a_graph_that_takes_tensors(
        self, tensor_bundles: dict[str, Bundle], tmp_path: Path
    ) -> None:
        np.save(tmp_path / "x.npy", np.zeros((2, 32, 32, 3), np.uint8))
        with pytest.raises(InputError, match="has no mean and std"):
            list(open_images(tensor_bundles["vit_gmm"], str(tmp_path / "x.npy"), limit=2))
        np.save(tmp_path / "t.npy", np.zeros((2, 3, 32, 32), np.float32))
        assert len(list(open_images(tensor_bundles["vit_gmm"], str(tmp_path / "t.npy"), limit=2))) == 1

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("x.npz", b"junk", r"expected an \.npz"),
            (
                "x.npz",
                np.zeros((3, 28, 28, 3), np.uint8),
                r"expected uint8 \(N, 32, 32, 3\), got uint8 \(3, 28, 28, 3\)",
            ),
            ("x.npz", np.zeros((0, 32, 32, 3), np.uint8), "it holds no image"),
            ("x.npz", np.zeros((3, 32, 32, 3), np.float32), "got float32"),
            ("x.npz", np.array([{}], dtype=object), r"expected an \.npz or \.npy file of plain arrays"),
            ("", None, "expected image files, got none; there are no other files"),
            ("broken.png", b"\x89PNG junk", r"broken\.png"),
        ],
    )
    def test_what_holds_no_usable_image(
        self, name: str, content: Any, message: str, bundle: Bundle, tmp_path: Path
    ) -> None:
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        elif content is not None:
            np.savez(tmp_path / name, **(content if isinstance(content, dict) else {"images": content}))
        with pytest.raises((InputError, ImageError), match=message):
            list(open_images(bundle, str(tmp_path / name), limit=4))

    def test_float_arrays_that_are_not_finite(self, tensor_bundles: dict[str, Bundle], tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", np.full((1, 3, 32, 32), np.inf, np.float32))
        with pytest.raises(InputError, match="not finite"):
            open_images(tensor_bundles["vit_gmm"], str(tmp_path / "x.npy"), limit=4)
