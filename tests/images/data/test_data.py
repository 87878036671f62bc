"""Data sets as they are downloaded: small copies, written here in the original formats."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import scipy.io
from PIL import Image

from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.images.data.images import ArrayImages
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.images.spec import ImageSpec
from tests.conftest import rgb

RNG = np.random.default_rng(0)


def pixels(count: int, side: int = 32) -> np.ndarray:
    return RNG.integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def rows(images: np.ndarray) -> np.ndarray:
    """(N, 32, 32, 3) → (N, 3072), plane after plane."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


class Python2Pickler(pickle._Pickler):
    """Write byte strings as Python 2 did, because the real archives were written by Python 2."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text: bytes) -> None:
        short = len(text) < 256
        self.write(b"U" + bytes([len(text)]) + text if short else b"T" + struct.pack("<i", len(text)) + text)

    dispatch[bytes] = save_string


def python2_pickle(data: object) -> bytes:
    out = io.BytesIO()
    Python2Pickler(out, protocol=2).dump(data)
    return out.getvalue()


@pytest.fixture
def cifar10(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """The python version's folder, five training batches of two images and a test batch of three."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    train, test = pixels(10), pixels(3)
    for number in range(5):
        part = {b"data": rows(train[2 * number : 2 * number + 2]), b"labels": [number, 9 - number]}
        (folder / f"data_batch_{number + 1}").write_bytes(python2_pickle(part))
    (folder / "test_batch").write_bytes(python2_pickle({b"data": rows(test), b"labels": [3, 1, 2]}))
    return folder, test


def packed(folder: Path, out: Path) -> Path:
    """Pack the folder as the archive that is downloaded."""
    out.mkdir()
    archive = out / f"{folder.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    return archive


def test_cifar10_python_in_a_folder_and_packed(cifar10: tuple[Path, np.ndarray]) -> None:
    folder, expected = cifar10
    for path in (folder, folder.parent, packed(folder, folder.parent / "packed")):
        images = open_data(f"cifar10:{path}")
        assert len(images) == 3
        assert [images.label(index) for index in range(3)] == [3, 1, 2]
        assert np.stack([images.pixels(index, rgb(32)) for index in range(3)]).tobytes() == expected.tobytes()
    assert images.classes[3] == "cat"
    assert images.where(1) == "cifar10 test[1]"
    train = open_data(f"cifar10:{folder}#train")
    assert [train.label(index) for index in range(10)] == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_binary(classes: int, tmp_path: Path) -> None:
    images, labels = pixels(4), np.array([1, 7, 0, classes - 1], np.uint8)
    head = labels[:, None] if classes == 10 else np.stack([np.full(4, 19, np.uint8), labels], axis=1)
    name = "test_batch.bin" if classes == 10 else "test.bin"
    (tmp_path / name).write_bytes(np.concatenate([head, rows(images)], axis=1).tobytes())
    dataset = open_data(f"cifar{classes}:{tmp_path}")
    assert [dataset.label(index) for index in range(4)] == labels.tolist()
    assert dataset.pixels(2, rgb(32)).tobytes() == images[2].tobytes()
    assert len(dataset.classes) == classes


def test_cifar100_python_has_fine_labels(tmp_path: Path) -> None:
    data = {b"data": rows(pixels(2)), b"fine_labels": [5, 99], b"coarse_labels": [0, 1]}
    (tmp_path / "test").write_bytes(python2_pickle(data))
    images = open_data(f"cifar100:{tmp_path}")
    assert [images.label(0), images.label(1)] == [5, 99]


class Hostile:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.victim}",)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Hostile(victim), b"labels": []}))
    with pytest.raises(InputError, match="which creates no array; no code of the file was run"):
        open_data(f"cifar10:{tmp_path}")
    assert not victim.exists()
    pickle.loads((tmp_path / "test_batch").read_bytes())
    assert victim.exists()  # it would have


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": 1}),
        pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [1, 2]}),
    ],
)
def test_damaged_cifar(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(data)
    with pytest.raises(InputError, match="test_batch"):
        open_data(f"cifar10:{tmp_path}")


def test_svhn(tmp_path: Path) -> None:
    images = pixels(3)
    scipy.io.savemat(tmp_path / "test_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": np.array([[10], [1], [9]])})
    for path in (tmp_path, tmp_path / "test_32x32.mat"):
        dataset = open_data(f"svhn:{path}")
        assert [dataset.label(index) for index in range(3)] == [0, 1, 9]
        assert dataset.pixels(1, rgb(32)).tobytes() == images[1].tobytes()
    (tmp_path / "test_32x32.mat").write_bytes(b"junk")
    with pytest.raises(InputError, match=r"expected a .mat file of SVHN's cropped digits"):
        open_data(f"svhn:{tmp_path}")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist(suffix: str, tmp_path: Path) -> None:
    grey = RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8)
    files = {
        "t10k-images-idx3-ubyte": struct.pack(">4B3I", 0, 0, 8, 3, *grey.shape) + grey.tobytes(),
        "t10k-labels-idx1-ubyte": struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes([7, 2, 1]),
    }
    for name, data in files.items():
        (tmp_path / f"{name}{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    dataset = open_data(f"mnist:{tmp_path}")
    assert [dataset.label(index) for index in range(3)] == [7, 2, 1]
    small = dataset.pixels(0, rgb(28))
    assert small.tobytes() == grey[0][:, :, None].repeat(3, axis=2).tobytes()
    assert dataset.pixels(0, rgb(32)).shape == (32, 32, 3)
    assert dataset.pixels(0, ImageSpec(height=28, width=28, channels=1)).tobytes() == grey[0].tobytes()
    name = f"t10k-labels-idx1-ubyte{suffix}"
    broken = files["t10k-labels-idx1-ubyte"][:-1]
    (tmp_path / name).write_bytes(gzip.compress(broken) if suffix else broken)
    with pytest.raises(InputError, match="expected 3 values after the header, got 2"):
        open_data(f"mnist:{tmp_path}")


def jpeg(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, "JPEG")


def test_tiny_imagenet(tmp_path: Path) -> None:
    (tmp_path / "wnids.txt").write_text("n03\nn01\nn02\n")
    images = pixels(2, 64)
    jpeg(tmp_path / "val" / "images" / "val_0.JPEG", images[0])
    jpeg(tmp_path / "val" / "images" / "val_1.JPEG", images[1])
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn03\t0\t0\nval_1.JPEG\tn01\t0\t0\n")
    jpeg(tmp_path / "train" / "n02" / "images" / "n02_0.JPEG", images[0])
    dataset = open_data(f"tiny-imagenet:{tmp_path}")
    assert [dataset.label(0), dataset.label(1)] == [2, 0]  # sorted, not as wnids.txt has them
    data = (tmp_path / "val" / "images" / "val_1.JPEG").read_bytes()
    assert dataset.pixels(1, rgb(64)).tobytes() == rgb(64).pixels_from_bytes(data).tobytes()
    assert dataset.where(1).endswith("val_1.JPEG")
    train = open_data(f"tiny-imagenet:{tmp_path}#train")
    assert (len(train), train.label(0)) == (1, 1)
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\n")
    with pytest.raises(InputError, match="expected the folder of Tiny-ImageNet"):
        open_data(f"tiny-imagenet:{tmp_path}")


def test_class_folders(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.fromarray(pixels(1)[0]).save(tmp_path / "val" / name / "1.png")
    (tmp_path / "val" / "b" / "1.png").rename(tmp_path / "val" / "b" / "no_suffix")
    (tmp_path / "val" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "val" / "__MACOSX" / "b").mkdir(parents=True)
    (tmp_path / "val" / "__MACOSX" / "b" / "._1.png").write_bytes(b"\0\5\x16\7")
    Image.fromarray(pixels(1)[0]).save(tmp_path / "val" / "stray.png")
    dataset = open_data(f"folder:{tmp_path / 'val'}")
    assert dataset.classes == ("a", "b", "c")
    assert [dataset.label(index) for index in range(len(dataset))] == [0, 1, 2]
    assert [(kind.kind, kind.files) for kind in dataset.left_out] == [
        (".txt", 1),
        ("in hidden folders", 1),
        ("outside the class folders", 1),
    ]
    flat = open_data(f"folder:{tmp_path / 'val' / 'a'}")
    assert (len(flat), flat.label(0), flat.classes) == (1, None, ())
    (tmp_path / "val" / "a" / "1.png").write_bytes(b"junk")
    with pytest.raises(ImageError, match=r"1\.png"):
        dataset.pixels(0, rgb(32))
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "empty", "expected at least one image file"), (tmp_path / "none", "no such")):
        with pytest.raises(InputError, match=message):
            open_data(f"folder:{path}")


def test_class_folders_have_one_form_of_unicode(tmp_path: Path) -> None:
    for name in ("cafe\u0301", "caf\u00e9", "the\u0301 "):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.fromarray(pixels(1)[0]).save(tmp_path / "images" / name / "1.png")
    dataset = open_data(f"folder:{tmp_path / 'images'}")
    assert dataset.classes == ("caf\u00e9", "th\u00e9")
    assert [dataset.label(index) for index in range(len(dataset))] == [0, 0, 1]
    (tmp_path / "images" / os.fsdecode(b"caf\xe9")).mkdir()
    with pytest.raises(InputError, match="expected names in UTF-8"):
        open_data(f"folder:{tmp_path / 'images'}")


@pytest.mark.parametrize(
    ("files", "classes"),
    [
        (["bus/1.png", "train/1.png"], ("bus", "train")),
        (["bus/1.png", "train/1.png", "train/.ipynb_checkpoints/1.png"], ("bus", "train")),
        (["train/1.png", "test/1.png"], ()),
        (["train/cat/1.png", "extra/1.png"], ("cat",)),
    ],
)
def test_a_folder_called_train_beside_other_classes_is_a_class(
    files: list[str], classes: tuple[str, ...], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(1)[0]).save(tmp_path / name)
    assert open_data(f"folder:{tmp_path}#train").classes == classes


def test_array_files(tmp_path: Path) -> None:
    images = pixels(4, 20)
    np.savez(tmp_path / "x.npz", images=images, labels=np.array([3, 1, 0, 2]))
    np.save(tmp_path / "x.npy", images)
    dataset = open_data(f"array:{tmp_path / 'x.npz'}")
    assert [dataset.label(index) for index in range(4)] == [3, 1, 0, 2]
    assert dataset.pixels(0, rgb(20)).tobytes() == images[0].tobytes()
    assert open_data(f"array:{tmp_path / 'x.npy'}").label(0) is None
    np.savez(tmp_path / "y.npz", pictures=images)
    np.savez(tmp_path / "z.npz", images=images, labels=np.zeros(3, int))
    for name, message in (
        ("y.npz", "an array called images"),
        ("z.npz", "expected 4 labels, all whole numbers"),
        ("w.npz", "no such"),
    ):
        with pytest.raises(InputError, match=message):
            open_data(f"array:{tmp_path / name}")


@pytest.mark.parametrize(
    "array", [np.zeros((2, 4, 4, 5), np.uint8), np.zeros((2, 4, 4), np.float32), np.zeros((0, 4, 4), np.uint8)]
)
def test_arrays_that_are_no_images(array: np.ndarray) -> None:
    with pytest.raises(InputError, match="x: "):
        ArrayImages("x", array, None)


def test_digits_are_split_as_documented() -> None:
    assert (len(open_data("digits")), len(open_data("digits#train"))) == (360, 1437)


def test_files_that_are_no_archives_of_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"junk")
    with pytest.raises(InputError, match="expected a folder or a tar archive"):
        open_data(f"cifar10:{tmp_path / 'x.tar.gz'}")
    with tarfile.open(tmp_path / "y.tar", "w") as tar:
        info = tarfile.TarInfo("other")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(
        InputError,
        match=r"expected CIFAR-10 in this folder or archive, but the file test_batch or test_batch\.bin is missing",
    ):
        open_data(f"cifar10:{tmp_path / 'y.tar'}")


def test_a_packed_file_whose_bytes_are_damaged(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(RNG.bytes(5000)))
    data[10] = 0xFF  # a block of a type that deflate does not have
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"t10k-images-idx3-ubyte\.gz cannot be read"):
        open_data(f"mnist:{tmp_path}")
