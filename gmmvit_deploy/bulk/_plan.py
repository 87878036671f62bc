"""The plan of a job: what makes its rows, and its shards.  It is written once and never changes.

Files below ``_job`` in the folder of the job:

    plan.json          `Plan`
    manifest-*.jsonl   a line [id, offset, size] for each image, shard after shard
    listing-*.jsonl    a line [path, size, mark] for each file of the source
    rows-*.arrow       `Rows` of shards that are not complete

The bytes of the first three depend on the source, the bundle and the options alone: processes that start together
write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gmmvit_deploy.bulk._storage import JOB_FOLDER, Claims, Storage
from gmmvit_deploy.bulk.source import Entry, Source, SourceFile
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.images.data.files import LeftOut, LeftOutKind, left_out_text
from gmmvit_deploy.progress import OnProgress, Progress, ignore

_FORMAT = "gmmvit-bulk/2"
_PLAN = f"{JOB_FOLDER}/plan.json"
_SHOWN = 3
_NEW_FOLDER = "type --to with a new folder to classify everything again, or go back to what the folder was started with"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What makes the rows of a job, besides the images.

    bundle_sha256: the bundle.  runner: name and precision, such as ``openvino:bf16``.
    batch: images in each batch.  shard_images: the maximum number of images in a shard.
    image_column: the column of a Parquet source; else empty.
    versions: name → version of each package that reads, computes or rounds.
    """

    bundle_sha256: str
    runner: str
    batch: int
    shard_images: int
    image_column: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """A shard: consecutive images of the manifest.

    file: the file that contains the images; empty for images in files of their own.
    start, end: the place of the shard's lines in the manifest, in bytes.
    """

    number: int
    file: str
    images: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Content of ``plan.json``.

    kind: the kind of the source.  files: the number of its files.  listing_sha256: the hash of their list.
    manifest, listing: the names of the files with the images, and with the files of the source.
    left_out: the files, and the members of archives, that are not images.
    """

    settings: Settings
    kind: str
    files: int
    listing_sha256: str
    manifest: str
    listing: str
    images: int
    shards: tuple[ShardRecord, ...]
    left_out: tuple[LeftOutKind, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode()


def shard_name(number: int) -> str:
    return f"shard-{number:05}.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a shard from ``start`` up to ``end``, in a file of their own until the shard is complete."""

    shard: int
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{JOB_FOLDER}/rows-{self.shard:05}-{self.start:08}-{self.end:08}.arrow"


def kept_rows(storage: Storage) -> dict[int, list[Rows]]:
    """Return number of a shard → its kept rows, one after the other from the first; none if the first are missing."""
    found = [re.fullmatch(r"rows-(\d+)-(\d+)-(\d+)\.arrow", name) for name in sorted(storage.names(JOB_FOLDER))]
    chains: dict[int, list[Rows]] = {}
    for number, start, end in (map(int, match.groups()) for match in found if match):
        chain = chains.setdefault(number, [])
        if start == (chain[-1].end if chain else 0):  # two processes on an object store can keep overlapping rows
            chain.append(Rows(shard=number, start=start, end=end))
    return chains


def kept_ends(storage: Storage) -> dict[int, int]:
    """Return number of a shard → the number of its images whose rows are kept."""
    return {number: rows[-1].end if rows else 0 for number, rows in kept_rows(storage).items()}


def remove_rows(storage: Storage, number: int) -> None:
    """Remove the kept rows of a complete shard, those of other processes too."""
    for name in storage.names(JOB_FOLDER):
        if name.startswith(f"rows-{number:05}-"):
            storage.remove(f"{JOB_FOLDER}/{name}")


def read_plan(storage: Storage) -> Plan | None:
    """Read the plan of a job, or return None if the folder has none.

    Errors: InputError when the plan cannot be read.
    """
    try:
        data = json.loads(storage.read(_PLAN))
        if (written := data.pop("format")) != _FORMAT:
            raise ValueError(f"expected the format {_FORMAT}, got {written}")
        settings = Settings(**data.pop("settings"))
        shards = tuple(ShardRecord(**shard) for shard in data.pop("shards"))
        left_out = tuple(LeftOutKind(**kind) for kind in data.pop("left_out"))
        return Plan(settings=settings, shards=shards, left_out=left_out, **data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(
            f"{storage.url}/{_PLAN}: expected the plan of a job: {exc}", hint="type --to with a new folder"
        ) from exc


def settled_plan(
    storage: Storage, claims: Claims, source: Source, settings: Settings, *, on_progress: OnProgress = ignore
) -> Plan:
    """Return the plan of the folder: the existing plan, if it is that of this source and these settings, or a new plan.

    Errors: InputError when the folder has the plan of another source or of other settings, or other files.
    """
    with claims.plan():
        plan = read_plan(storage)
        if plan is None:
            if strangers := sorted(storage.names() - {JOB_FOLDER}):
                raise InputError(
                    f"{storage.url}: expected a new or empty folder, or the folder of a job; it holds {strangers[0]}",
                    hint="type --to with a new folder",
                )
            written = _write_plan(storage, source, settings, on_progress)
            plan = read_plan(storage) or written  # where there are no locks, another process may have written its plan
    require_same(plan, settings, what=storage.url)
    listing_sha256 = _sha256_of_listing(source)
    if listing_sha256 != plan.listing_sha256:
        raise InputError(
            f"{storage.url}: the source is not the source that the folder was started with: "
            f"{_difference(storage, plan, source)}",
            hint=_NEW_FOLDER,
        )
    return plan


def require_same(plan: Plan, settings: Settings, *, what: str) -> None:
    """Check that settings are those of a plan.  Errors: InputError that names every difference."""
    expected, actual = _flat(plan.settings), _flat(settings)
    changes = [
        f"{name}: expected {expected.get(name, 'no value')}, got {actual.get(name, 'no value')}"
        for name in sorted({*expected, *actual})
        if expected.get(name) != actual.get(name)
    ]
    if changes:
        raise InputError(f"{what}: the folder was started with other settings: {'; '.join(changes)}", hint=_NEW_FOLDER)


def _flat(settings: Settings) -> dict[str, str]:
    versions = {f"version of {name}": value for name, value in settings.versions.items()}
    names = {
        "bundle": settings.bundle_sha256,
        "--runner": settings.runner,
        "--batch": str(settings.batch),
        "--shard-images": str(settings.shard_images),
        "--image-column": settings.image_column,
    }
    return {**names, **versions}


def entries_of(storage: Storage, plan: Plan, shard: ShardRecord) -> list[Entry]:
    """Read the images of a shard from the manifest.  Errors: InputError when the manifest is damaged."""
    name = f"{JOB_FOLDER}/{plan.manifest}"
    try:
        lines = storage.read(name, shard.start, shard.end).splitlines()
        entries = [Entry(*json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as exc:
        raise InputError(f"{storage.url}/{name}: cannot be read: {exc}", hint="type --to with a new folder") from exc
    if len(entries) != shard.images:
        raise InputError(
            f"{storage.url}/{name}: expected {shard.images} images in shard {shard.number}, got {len(entries)}",
            hint="type --to with a new folder",
        )
    return entries


def _line(values: tuple[Any, ...]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _sha256_of_listing(source: Source) -> str:
    digest = hashlib.sha256(source.kind.encode())
    for file in source.files:
        digest.update(_line(file))
    return digest.hexdigest()


def _write_plan(storage: Storage, source: Source, settings: Settings, on_progress: OnProgress) -> Plan:
    listing_sha256 = _sha256_of_listing(source)
    # Plans of different sources or settings never share a file, even if their processes run at once.
    identity = hashlib.sha256(f"{listing_sha256} {settings.shard_images} {settings.image_column}".encode())
    suffix = f"{identity.hexdigest()[:12]}.jsonl"
    plan = Plan(
        settings=settings,
        kind=source.kind,
        files=len(source.files),
        listing_sha256=listing_sha256,
        manifest=f"manifest-{suffix}",
        listing=f"listing-{suffix}",
        images=0,
        shards=(),
    )
    with storage.written(f"{JOB_FOLDER}/{plan.listing}") as file:
        for listed in source.files:
            file.write(_line(listed))
    left_out = LeftOut()
    with storage.written(f"{JOB_FOLDER}/{plan.manifest}") as file:
        shards = tuple(_cut(source.entries(left_out), settings.shard_images, file, on_progress))
    images = sum(shard.images for shard in shards)
    if not images:
        raise InputError(f"source {source.url}: expected images, got none; {left_out_text(left_out.kinds())}")
    plan = replace(plan, shards=shards, images=images, left_out=left_out.kinds())
    with storage.written(_PLAN) as file:
        file.write(plan.to_json())
    return plan


def _cut(
    images_of_files: Iterable[tuple[str, Entry]], max_images: int, manifest: Any, on_progress: OnProgress
) -> Iterator[ShardRecord]:
    """Write the manifest, and yield the shards: at most ``max_images`` each, from a single file of the source."""
    number = images = start = end = total = 0
    current: str | None = None
    for file, entry in images_of_files:
        if images and (file != current or images == max_images):
            yield ShardRecord(number=number, file=current or "", images=images, start=start, end=end)
            number, images, start = number + 1, 0, end
        current = file
        line = _line(entry)
        manifest.write(line)
        images, end, total = images + 1, end + len(line), total + 1
        if total % 1000 == 0:
            on_progress(Progress("list the images", total))
    if images:
        yield ShardRecord(number=number, file=current or "", images=images, start=start, end=end)


def _difference(storage: Storage, plan: Plan, source: Source) -> str:
    with storage.open(f"{JOB_FOLDER}/{plan.listing}") as file:
        before = {row.path: row for row in (SourceFile(*json.loads(line)) for line in file)}
    now = {file.path: file for file in source.files}
    if plan.kind != source.kind:
        return f"expected files of kind {plan.kind}, got {source.kind}"
    changed = [path for path in before if path in now and before[path] != now[path]]
    groups: Mapping[str, list[str]] = {
        "changed": changed,
        "missing": [path for path in before if path not in now],
        "new": [path for path in now if path not in before],
    }
    return "; ".join(
        f"{len(paths)} {word} ({', '.join(paths[:_SHOWN])}{', …' if len(paths) > _SHOWN else ''})"
        for word, paths in groups.items()
        if paths
    )
