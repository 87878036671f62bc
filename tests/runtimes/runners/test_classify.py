from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError, ServerError
from gmmvit_deploy.images.data.files import LeftOut, image_files, left_out_text
from gmmvit_deploy.runtimes.programs import openvino as runtime_module
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier, Classifier, TritonClassifier, classify_files
from tests.inference.test_preprocess import encoded, photo
from tests.serving.shared import Running


@pytest.fixture
def folder(tmp_path: Path, bundle: Bundle) -> Path:
    """A folder of eight golden images as PNG files, named by row."""
    images = tmp_path / "images"
    images.mkdir()
    for row, pixels in enumerate(bundle.golden()[0]):
        Image.fromarray(pixels).save(images / f"{row}.png")
    return images


@pytest.fixture(params=["bundle", "grpc", "http"])
def classifier(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Classifier]:
    if request.param == "bundle":
        opened: Classifier = BundleClassifier(bundle)
    else:
        server: Running = request.getfixturevalue("server")
        opened = TritonClassifier(server.grpc_url if request.param == "grpc" else server.http_url)
    with opened:
        yield opened


@pytest.mark.parametrize("batch", [3, 100])
def test_answers_are_those_of_the_network(classifier: Classifier, folder: Path, bundle: Bundle, batch: int) -> None:
    logits = bundle.golden()[1].astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    counts: list[tuple[int, int | None]] = []
    answers = classify_files(
        classifier,
        image_files([str(folder)]),
        top=3,
        batch=batch,
        on_progress=lambda event: counts.append((event.done, event.total)),
    )
    assert counts[-1] == (8, 8)
    for row, answer in enumerate(answers):
        assert answer.path.name == f"{row}.png"
        assert answer.error == ""
        assert len(answer.predictions) == 3
        best = answer.predictions[0]
        assert best.index == logits[row].argmax()
        assert best.label == bundle.manifest.labels[best.index]
        for prediction in answer.predictions:
            assert prediction.probability == pytest.approx(probabilities[row, prediction.index], abs=1e-5)


def test_a_bad_file_spoils_nobody_else_s_answer(classifier: Classifier, folder: Path) -> None:
    (folder / "2.png").write_bytes(b"no image")
    (folder / "4.png").write_bytes(b"")
    (folder / "6.png").write_bytes((folder / "6.png").read_bytes()[:-2000])
    answers = classify_files(classifier, image_files([str(folder)]), batch=4)
    assert [bool(answer.error) for answer in answers] == [False, False, True, False, True, False, True, False]
    assert "not a JPEG, PNG, WEBP or BMP image" in answers[2].error
    assert answers[4].error == "the file is empty"
    assert all(answer.predictions for answer in answers if not answer.error)


def test_a_file_that_cannot_be_read(classifier: Classifier, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        # root may read everything, so permissions alone cannot cause the refusal
        if path.name == "3.png":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    answers = classify_files(classifier, image_files([str(folder)]))
    assert [answer.path.name for answer in answers if answer.error] == ["3.png"]
    assert answers[3].error == "the file cannot be read: Permission denied"


def test_tensor_bundles_with_normalisation_classify_too(tensor_bundle: Bundle, folder: Path, bundle: Bundle) -> None:
    with BundleClassifier(tensor_bundle) as of_tensors, BundleClassifier(bundle) as of_pixels:
        for a, b in zip(*(classify_files(c, image_files([str(folder)])) for c in (of_tensors, of_pixels)), strict=True):
            assert [p.label for p in a.predictions] == [p.label for p in b.predictions]
            assert a.predictions[0].probability == pytest.approx(b.predictions[0].probability, abs=1e-5)


def test_a_bundle_without_normalisation_cannot_classify(tensor_bundles: dict[str, Bundle]) -> None:
    with pytest.raises(InputError, match="has no mean and std, so images cannot be turned into inputs"):
        BundleClassifier(tensor_bundles["vit_gmm"])


def test_a_model_that_takes_no_images(server: Running) -> None:
    with pytest.raises(
        ServerError, match="expected a model with encoded images as its input IMAGE, got the inputs pixels"
    ):
        TritonClassifier(server.grpc_url, model="gmmvit_network")


class TestImageFiles:
    def test_folder_glob_and_file(self, tmp_path: Path) -> None:
        for name in ("b.JPG", "a.png", "deep/er/c.webp", "no_suffix"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(encoded(photo(4, 4), "PNG"))
        for name in (".thumbnails/a.png", "__MACOSX/a.png"):
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_bytes(encoded(photo(4, 4), "PNG"))
        for name in ("notes.txt", "deep/._c.webp"):
            (tmp_path / name).write_bytes(b"no image")
        expected = ["a.png", "b.JPG", "c.webp", "no_suffix"]
        for argument in (tmp_path, tmp_path / "**"):
            left_out = LeftOut()
            assert [path.name for path in image_files([str(argument)], left_out)] == expected
            names = f"2 in hidden folders ({tmp_path}/.thumbnails/a.png, …), "
            names += f"1 ._* ({tmp_path}/deep/._c.webp), 1 .txt ({tmp_path}/notes.txt)"
            if argument.is_dir():  # a pattern matches no hidden file
                assert left_out_text(left_out.kinds()) == f"4 files were left out: {names}"
        assert [path.name for path in image_files([str(tmp_path / "*.png")])] == ["a.png"]
        assert [path.name for path in image_files([str(tmp_path / "**/*.webp")])] == ["c.webp"]
        # a named file is included whatever its suffix, and only once
        named = str(tmp_path / "notes.txt")
        assert image_files([named, named]) == [tmp_path / "notes.txt"]

    def test_a_name_with_brackets_is_a_file_first(self, tmp_path: Path) -> None:
        (tmp_path / "a[1].png").touch()
        assert image_files([str(tmp_path / "a[1].png")]) == [tmp_path / "a[1].png"]


def test_answers_carry_the_reason_why_our_kernels_are_not_used(
    folder: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "openvino_library", lambda: (None, "no C++ compiler"))
    (folder / "1.png").write_bytes(b"")
    with BundleClassifier(bundle) as opened:
        answers = classify_files(opened, [folder / "0.png", folder / "1.png"])
    assert [(answer.runner, answer.notice) for answer in answers] == [
        ("openvino", "not the fastest runner: openvino+kernels: no C++ compiler")
    ] * 2
    with BundleClassifier(bundle, runner="openvino") as opened:
        (answer,) = classify_files(opened, [folder / "0.png"])
    assert (answer.runner, answer.notice) == ("openvino", "")
