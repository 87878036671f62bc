"""The state folder of a service: which bundle each of its models has, also after a restart.

DIR/lock                 locked by the running service; a second service on the same folder is refused
DIR/promoted.json        for each model, the hash of the bundle that was promoted last, and of the bundle before
DIR/bundles/NAME/HASH    the bundles of a model, copied, so that a bundle may be moved or deleted after its rollout.
                         Models share none: two copies of a bundle may have different choices of `gmmvit optimize`
DIR/control              the socket on which the running service takes orders (`rollout.control`)
"""

from __future__ import annotations

import fcntl
import filecmp
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import MANIFEST_FILE, Bundle, open_bundle
from gmmvit_deploy.bundle.choices import CHOICES_FILE
from gmmvit_deploy.bundle.variants import GRAPHS
from gmmvit_deploy.errors import InputError, ServerError
from gmmvit_deploy.files.writing import new_file, new_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted:
    """What ``promoted.json`` states for each model.

    bundle: SHA-256 of the bundle that the model has.  before: that of the bundle before; empty for the first.
    """

    bundle: str
    before: str = ""


class State:
    """The state folder of a service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def socket_path(self) -> Path:
        return self.folder / "control"

    @property
    def record_path(self) -> Path:
        return self.folder / "promoted.json"

    @contextmanager
    def locked(self) -> Iterator[State]:
        """Hold the lock of the folder.

        Errors: InputError for a folder that cannot be written, or with other files. ServerError when another service
        holds the lock.
        """
        try:
            self._require_own()
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("a", encoding="utf-8")
        except OSError as exc:
            raise InputError(
                f"{self.folder}: expected a folder that this user can write, got: {exc.strerror}",
                hint="type --state with another folder",
            ) from exc
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ServerError(
                    f"{self.folder}: a service with this state folder is already running",
                    hint=f"type gmmvit rollout BUNDLE --to {self.folder} to serve another bundle, or stop the running "
                    "service",
                ) from None
            yield self

    def _require_own(self) -> None:
        """Refuse a folder with files that no service wrote.  Errors: InputError; OSError for an unreadable folder."""
        if foreign := self.foreign_content():
            raise InputError(
                f"{self.folder}: expected an empty or new folder, or the state folder of a service, got {foreign}",
                hint="type --state with a folder that does not exist yet; the service creates the folder",
            )

    def foreign_content(self) -> str:
        """Return what the folder is if it has files that no service wrote, such as ``a bundle``; else an empty text.

        Errors: OSError for an unreadable folder.
        """
        if self.folder.is_file():
            return "a file"
        present = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
        foreign = sorted(name for name in present - {"lock", "control", "bundles"} if not name.startswith("."))
        if self.record_path.name in present or not foreign:
            return ""
        return "a bundle" if MANIFEST_FILE in present else f"a folder with other files ({foreign[0]})"

    def promoted(self) -> dict[str, Promoted]:
        """Read name of a model → its bundles; empty if the folder is new.  Errors: InputError for another form."""
        path = self.record_path
        try:
            data = dict(json.loads(path.read_text(encoding="utf-8")))
            promoted = {name: Promoted(**hashes) for name, hashes in data.items()}
            if not data or not all(isinstance(value, str) for each in promoted.values() for value in astuple(each)):
                raise TypeError("no model, or a hash that is no text")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as exc:
            raise InputError(
                f"{path}: expected the record of the promoted bundles, "
                + (f"got {exc.strerror}" if isinstance(exc, OSError) else "got other content"),
                hint=f"delete {path}, then type gmmvit serve BUNDLE --gateway --keys FILE --state {self.folder} with "
                "the bundle to serve",
            ) from exc
        return promoted

    def promote(self, bundles: Mapping[str, Bundle]) -> None:
        """Record that the service serves ``bundles`` from now on, and delete bundles that are not needed any more.

        bundles: name of each model → its bundle.  After an OutputError, the record of before stays.
        """
        record = self.promoted()
        for name, bundle in bundles.items():
            last = record.get(name)
            if last is None or last.bundle != bundle.sha256:
                record[name] = Promoted(bundle=bundle.sha256, before=last.bundle if last else "")
        with new_file(self.record_path, force=True) as file:
            file.write(json.dumps({name: asdict(promoted) for name, promoted in record.items()}).encode())
        self._delete_bundles_except(record)

    def copy_of(self, name: str, bundle: Bundle) -> Bundle:
        """Copy a bundle of the model ``name`` into the folder, and open the copy.  Errors: OutputError, BundleError.

        A copy that is there gets what conversions and choices have added to the bundle since.
        """
        path = self.path_of(name, bundle.sha256)
        if not path.exists():
            path.parent.mkdir(exist_ok=True, parents=True)
            with new_folder(path) as folder:
                for file in sorted(bundle.path.iterdir()):
                    if file.is_file():
                        shutil.copyfile(file, folder / file.name)
                if (bundle.path / GRAPHS).is_dir():
                    shutil.copytree(bundle.path / GRAPHS, folder / GRAPHS)
        elif not path.samefile(bundle.path):
            # A record is of a graph and a choice of records, so they come after.
            graphs = sorted((bundle.path / GRAPHS).glob("*"), key=lambda file: (file.suffix == ".json", file.name))
            for source in (*graphs, bundle.path / CHOICES_FILE):
                target = path / source.relative_to(bundle.path)
                if source.is_file() and not (target.is_file() and filecmp.cmp(source, target, shallow=False)):
                    target.parent.mkdir(exist_ok=True)
                    with source.open("rb") as old, new_file(target, force=True) as new:
                        shutil.copyfileobj(old, new)
        return open_bundle(path)

    def path_of(self, name: str, sha256: str) -> Path:
        """Return the copy of a bundle of the model ``name``."""
        return self.folder / "bundles" / name / sha256

    def promoted_bundles(self) -> dict[str, Bundle]:
        """Open the bundles that were promoted last; empty if the folder is new.  Errors: InputError, BundleError."""
        return {name: open_bundle(self.path_of(name, promoted.bundle)) for name, promoted in self.promoted().items()}

    def _delete_bundles_except(self, record: Mapping[str, Promoted]) -> None:
        kept = {self.path_of(name, sha256) for name, each in record.items() for sha256 in (each.bundle, each.before)}
        for path in (self.folder / "bundles").glob("*/*"):
            if path not in kept and not path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)


def socket_address(path: Path) -> str:
    """Return an address for a Unix socket at ``path``.  Errors: InputError beyond the kernel's limit of 107 bytes."""
    address = os.path.abspath(path)
    if len(os.fsencode(address)) > 107:
        raise InputError(
            f"{path}: expected a state folder with a path of at most 99 bytes, because its socket's path has a limit",
            hint="type --state with a shorter path",
        )
    return address
