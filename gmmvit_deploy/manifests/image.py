"""Write a folder as an OCI image: a layout on the disk, without a daemon, and the same bytes for the same files.

    FOLDER/oci-layout              the version of the layout
    FOLDER/index.json              names the manifest by its digest
    FOLDER/blobs/sha256/DIGEST     the manifest, the configuration, and a layer: a tar of ``/models``

Nothing in the image depends on the time, the user or the machine: owners are 0, times are 0, modes are 0755 and 0644,
and names are sorted. The layer is not compressed, because weights do not compress, and compressors differ.
Format: OCI image specification 1.1.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.writing import new_folder

__all__ = ["MODELS_FOLDER", "ModelImage", "image_from_folder"]

MODELS_FOLDER = "models"
"""The folder of the image that holds the files; KServe expects this name."""
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_INDEX = "application/vnd.oci.image.index.v1+json"
_EPOCH = "1970-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelImage:
    """path: the folder of the layout.  digest: of the manifest, ``sha256:…``, which pins every file.
    labels: of the image.  layer_bytes: the size of the layer.
    """

    path: Path
    digest: str
    labels: Mapping[str, str]
    layer_bytes: int


def image_from_folder(
    folder: Path, out: Path, labels: Mapping[str, str], *, tag: str = "latest", force: bool = False
) -> ModelImage:
    """Write the files of ``folder`` as an image to the folder ``out``.

    labels: of the image, also as annotations of its manifest.  tag: the name of the image in the layout.
    Errors: InputError when the folder holds a link or a special file. OutputError when ``out`` exists and ``force`` is
    False, or when writing fails.
    """
    with new_folder(out, force=force) as layout:
        blobs = layout / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        layer = _write_layer(folder, blobs)
        history = [{"created": _EPOCH, "created_by": "gmmvit pack", "comment": f"/{MODELS_FOLDER}"}]
        config = {
            "created": _EPOCH,
            "architecture": "amd64",
            "os": "linux",
            "config": {"Labels": dict(labels)},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
            "history": history,
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _write_json(blobs, _CONFIG, config),
            "layers": [layer],
            "annotations": dict(labels),
        }
        described = _write_json(blobs, _MANIFEST, manifest)
        named = {**described, "annotations": {"org.opencontainers.image.ref.name": tag}}
        index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [named]}
        (layout / "index.json").write_bytes(_json(index))
        (layout / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return ModelImage(path=out, digest=str(described["digest"]), labels=labels, layer_bytes=int(layer["size"]))


def _json(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _write_json(blobs: Path, media_type: str, data: Any) -> dict[str, Any]:
    content = _json(data)
    digest = hashlib.sha256(content).hexdigest()
    (blobs / digest).write_bytes(content)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)


def _write_layer(folder: Path, blobs: Path) -> dict[str, Any]:
    staged = blobs / "layer"
    with staged.open("wb") as file:
        hashed = _Hashed(file)
        with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
            archive.addfile(_entry(MODELS_FOLDER, None))
            for path in sorted(folder.rglob("*")):
                _add(archive, path, f"{MODELS_FOLDER}/{path.relative_to(folder).as_posix()}")
    digest = hashed.digest.hexdigest()
    staged.rename(blobs / digest)
    return {"mediaType": _LAYER, "digest": f"sha256:{digest}", "size": hashed.size}


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    if path.is_symlink() or not (path.is_file() or path.is_dir()):
        raise InputError(f"{path}: expected a file or a folder, got a link or a special file")
    if path.is_dir():
        archive.addfile(_entry(name, None))
        return
    with path.open("rb") as file:
        archive.addfile(_entry(name, path.stat().st_size), file)


def _entry(name: str, size: int | None) -> tarfile.TarInfo:
    """Return the header of a file of this size, or of a folder for None."""
    entry = tarfile.TarInfo(name)
    entry.type = tarfile.DIRTYPE if size is None else tarfile.REGTYPE
    entry.mode = 0o755 if size is None else 0o644
    entry.size = size or 0
    entry.mtime = 0
    return entry
