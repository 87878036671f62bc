"""Hostile bundles: a sound bundle with a changed file, and the right hashes in its manifest unless the manifest is the
attack. Each function changes a copy of the bundle.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gmmvit_deploy.bundle.artifacts import GOLDEN_FILE, LABELS_FILE, MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE, Bundle
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from tests.hostile.case import Case
from tests.hostile.checkpoints import small_checkpoint
from tests.hostile.graphs import GRAPHS

LABELS = ("cat", "dog", "frog")


def sound_bundle(folder: Path) -> Bundle:
    """Export a small ViT: images of 8×8, 3 classes, batches up to 64."""
    options = ExportOptions(mean=(0.5,) * 3, std=(0.5,) * 3, labels=LABELS, max_batch=64)
    return bundle_from_checkpoint(small_checkpoint(folder / "checkpoint.pth"), folder / "bundle", options)


def _copied(change: Callable[[Path], None], sound: Path, folder: Path, *, sign: bool = True) -> Path:
    bundle = folder / "bundle"
    shutil.copytree(sound, bundle)
    change(bundle)
    if sign:
        manifest = json.loads((bundle / MANIFEST_FILE).read_text())
        for name in manifest["files"]:
            if (bundle / name).is_file():
                manifest["files"][name] = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
        (bundle / MANIFEST_FILE).write_text(json.dumps(manifest))
    return bundle


# The manifest


def _edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        manifest = json.loads((bundle / MANIFEST_FILE).read_text())
        result = change(manifest)
        (bundle / MANIFEST_FILE).write_text(json.dumps(manifest if result is None else result))

    return edit


def _put(*path: str, value: Any) -> Callable[[Path], None]:
    def change(manifest: dict[str, Any]) -> None:
        inner = manifest
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value

    return _edited(change)


def _written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda bundle: (bundle / name).write_bytes(content) and None  # type: ignore[func-returns-value]


def _twice(bundle: Path) -> None:
    text = (bundle / MANIFEST_FILE).read_text()
    (bundle / MANIFEST_FILE).write_text('{"max_batch": 10000000000,' + text.lstrip()[1:])


def _utf_16(bundle: Path) -> None:
    text = (bundle / MANIFEST_FILE).read_text()
    (bundle / MANIFEST_FILE).write_text(text, encoding="utf-16")


def _labelled(*labels: str) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        (bundle / LABELS_FILE).write_text("\n".join(labels) + "\n")
        _put("labels", value=list(labels))(bundle)

    return change


def _listed(name: str) -> Callable[[Path], None]:
    return _edited(lambda manifest: manifest["files"].update({name: "0" * 64}))


MANIFESTS: dict[str, Callable[[Path], None]] = {
    "manifest: no JSON": _written(MANIFEST_FILE, b"format: bundle"),
    "manifest: nested 100,000 times": _written(MANIFEST_FILE, b"[" * 100_000),
    "manifest: a list": _written(MANIFEST_FILE, b"[1, 2]"),
    "manifest: a number of 10,000 digits": _written(MANIFEST_FILE, b'{"format": ' + b"9" * 10_000 + b"}"),
    "manifest: bytes that are no UTF-8": _written(MANIFEST_FILE, b'{"format": "\xff\xfe"}'),
    "manifest: UTF-16": _utf_16,
    "manifest: the same key twice": _twice,
    "manifest: format of the future": _put("format", value="gmmvit-bundle/999"),
    "manifest: no spec": _edited(lambda m: {name: value for name, value in m.items() if name != "spec"}),
    "manifest: an unknown field": _put("run", value="os.system"),
    "manifest: spec of an unknown family": _put("spec", "family", value="resnet"),
    "manifest: spec with a dim of 2**40": _put("spec", "dim", value=2**40),
    "manifest: spec with a depth of a million": _put("spec", "depth", value=1_000_000),
    "manifest: spec with a text as heads": _put("spec", "heads", value="2; rm -rf /"),
    "manifest: spec with an image below 0": _put("spec", "image_size", value=-8),
    "manifest: image of 10**9 pixels a side": _put("image", "height", value=10**9),
    "manifest: five channels": _put("image", "channels", value=5),
    "manifest: std of 0": _put("image", "std", value=[0.0, 0.5, 0.5]),
    "manifest: mean that is infinite": _put("image", "mean", value=[float("inf")] * 3),
    "manifest: unknown resize rule": _put("image", "resize", value="__import__"),
    "manifest: crop_pct of 1e-300": _edited(lambda m: m["image"].update(resize="center-bilinear", crop_pct=1e-300)),
    "manifest: batch of 0": _put("max_batch", value=0),
    "manifest: batch of 2**62": _put("max_batch", value=2**62),
    "manifest: batch that is a text": _put("max_batch", value="8\n}\nparameters {"),
    "manifest: labels of another number": _labelled("cat", "dog"),
    "manifest: labels that end the configuration of Triton": _labelled('cat"}} backend: "python', "dog", "frog"),
    "manifest: labels with terminal escapes": _labelled("\x1b[2J\x1b]0;owned\x07", "dog", "frog"),
    "manifest: the same label for two classes": _labelled("cat", "cat", "frog"),
    "manifest: outputs of another shape": _put(
        "outputs", value=[{"name": "logits", "shape": [4], "meaning": "logits"}]
    ),
    "manifest: a file outside the folder": _listed("../../../etc/passwd"),
    "manifest: an absolute file": _listed("/etc/passwd"),
    "manifest: a file with a zero byte in its name": _listed("a\0b"),
    "manifest: hashes that are numbers": _edited(lambda m: m.update(files=dict.fromkeys(m["files"], 7))),
    "manifest: no files": _put("files", value={}),
    "manifest: limits of NaN": _put("float32_noise", value=float("nan")),
    "manifest: limits of 1e308, which any logits meet": _put("float32_noise", value=1e308),
}


# golden.npz


def _golden(change: Callable[[dict[str, Any]], None], **options: Any) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        path = bundle / GOLDEN_FILE
        with np.load(path) as file:
            arrays = dict(file)
        change(arrays)
        (np.savez_compressed if options.get("compressed") else np.savez)(path, **arrays)

    return edit


def _npy(member: str, header: bytes, data: bytes = b"") -> Callable[[Path], None]:
    """Replace an array by a header by hand."""

    def edit(bundle: Path) -> None:
        path = bundle / GOLDEN_FILE
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        text = header + b" " * (63 - (len(header) + 10) % 64) + b"\n"
        members[f"{member}.npy"] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)

    return edit


def _bomb(bundle: Path) -> None:
    """Inputs of 4 GB of zeros in 4 MB."""
    path = bundle / GOLDEN_FILE
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (2**32 // 192, 8, 8, 3)}
    )
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            if name != "inputs.npy":
                archive.writestr(name, content)
        with archive.open("inputs.npy", "w", force_zip64=True) as member:
            member.write(header.getvalue())
            for _ in range(2**32 // 2**24):
                member.write(bytes(2**24))


def _set(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays.update({name: change(arrays[name])})


GOLDEN: dict[str, Callable[[Path], None]] = {
    "golden: no archive": _written(GOLDEN_FILE, b"text"),
    "golden: 4 GB in 4 MB": _bomb,
    "golden: objects of pickle": _golden(_set("logits", lambda a: np.array([{"a": 1}], dtype=object))),
    "golden: a header that is code": _npy("logits", b"__import__('os').system('touch canary')"),
    "golden: a header with a shape of 2**60": _npy(
        "logits", b"{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846976,), }"
    ),
    "golden: a header with a shape below 0": _npy(
        "logits", b"{'descr': '<f4', 'fortran_order': False, 'shape': (-5, 3), }", bytes(60)
    ),
    "golden: a header nested 4,000 times": _npy("logits", b"(" * 4000),
    "golden: no logits": _golden(lambda arrays: arrays.pop("logits") is None),
    "golden: logits of NaN": _golden(_set("logits", lambda a: a * np.nan)),
    "golden: logits of another shape": _golden(_set("logits", lambda a: a[:, :2])),
    "golden: logits that are texts": _golden(_set("logits", lambda a: a.astype(str))),
    "golden: logits of complex numbers": _golden(_set("logits", lambda a: a.astype(np.complex64))),
    "golden: no inputs": _golden(_set("inputs", lambda a: a[:0])),
    "golden: inputs of another size": _golden(_set("inputs", lambda a: a[:, :4])),
    "golden: images that end before they begin": _golden(_set("image_ends", lambda a: a[::-1])),
    "golden: images of 2**62 bytes": _golden(_set("image_ends", lambda a: a + 2**62)),
    "golden: images that are bombs": _golden(
        lambda arrays: arrays.update(
            image_bytes=np.frombuffer(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\x02\0\0\0", np.uint8),
            image_ends=np.array([29]),
            image_pixels=arrays["image_pixels"][:1],
            image_logits=arrays["image_logits"][:1],
        )
    ),
}


# Weights, labels and the folder


def _linked(name: str, target: str) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        (bundle / name).unlink()
        (bundle / name).symlink_to(target)

    return change


def _weights(change: Callable[[bytearray], None]) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        data = bytearray((bundle / WEIGHTS_FILE).read_bytes())
        change(data)
        (bundle / WEIGHTS_FILE).write_bytes(data)

    return edit


def _nan(data: bytearray) -> None:
    data[-64:] = struct.pack("<16f", *[float("nan")] * 16)


def _pipe(bundle: Path) -> None:
    (bundle / LABELS_FILE).unlink()
    os.mkfifo(bundle / LABELS_FILE)


FOLDER: dict[str, Callable[[Path], None]] = {
    "weights: no safetensors": _written(WEIGHTS_FILE, b"weights"),
    "weights: header of 2**60 bytes": _weights(lambda data: data.__setitem__(slice(0, 8), struct.pack("<Q", 2**60))),
    "weights: NaN": _weights(_nan),
    "weights: cut": _weights(lambda data: data.__delitem__(slice(-100, None))),
    "weights: a pickle with code": _written(WEIGHTS_FILE, b"\x80\x02cos\nsystem\nX\x05\0\0\0touch\x85R."),
    "folder: labels from /etc/passwd": _linked(LABELS_FILE, "/etc/passwd"),
    "folder: graph from a device without end": _linked(MODEL_FILE, "/dev/zero"),
    "folder: labels from a pipe that nobody writes": _pipe,
    "folder: manifest that is a link to itself": _linked(MANIFEST_FILE, MANIFEST_FILE),
}
UNSIGNED = ("folder: graph from a device without end", "folder: labels from a pipe that nobody writes")


def _graph(change: Callable[[onnx.ModelProto], Any], bundle: Path) -> None:
    model = onnx.load(bundle / MODEL_FILE)
    result = change(model)
    model = model if result is None or not isinstance(result, bytes | onnx.ModelProto) else result
    (bundle / MODEL_FILE).write_bytes(model if isinstance(model, bytes) else model.SerializeToString())


_VALID = {
    "manifest: the same key twice",
    "graph: terminal escapes as documentation",
    "manifest: the same label for two classes",
    "manifest: labels with terminal escapes",
    "manifest: labels that end the configuration of Triton",
}
"""Bundles that are unusual, but keep the contract of a bundle."""

_CHANGES: dict[str, Callable[[Path], None]] = {
    **MANIFESTS,
    **GOLDEN,
    **FOLDER,
    **{name: partial(_graph, change) for name, change in GRAPHS.items()},
}
BUNDLES: tuple[Case, ...] = tuple(
    Case(
        kind="bundle",
        name=name,
        make=partial(_copied, change, sign=name not in UNSIGNED and "manifest" not in name),
        may_be_answered=name in _VALID,
    )
    for name, change in _CHANGES.items()
)
"""The hostile bundles; ``make(sound, folder)`` writes a changed copy of the bundle ``sound`` into the folder."""
