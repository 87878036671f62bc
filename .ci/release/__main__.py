"""The steps of a release, in order: see the package."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from release.archives import build, check_metadata, check_sdist, check_wheel
from release.steps import (
    ReleaseError,
    check_changelog,
    check_committed,
    package_version,
    supported_pythons,
    tracked_files,
)
from release.wheel_in_use import find_python, use_wheel

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]
_CHECKPOINT = "tests/golden/vit_gmm.pth"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps; returns the exit status."""
    supported = supported_pythons(_ROOT)
    parser = argparse.ArgumentParser(
        prog="make release ARGS=...", description="Build the sdist and the wheels, check them, and use the wheel."
    )
    parser.add_argument(
        "--python", action="append", choices=supported, help="Use the wheel with this version only; may be repeated."
    )
    parser.add_argument(
        "--rehearsal", action="store_true", help="Accept the heading [Unreleased] and uncommitted changes."
    )
    parser.add_argument("--build-only", action="store_true", help="Build and check, and do not use the wheel.")
    parser.add_argument("--output", type=Path, default=_ROOT / "dist", help="Folder of the archives. [default: dist]")
    options = parser.parse_args(arguments)
    try:
        version = package_version(_ROOT)
        check_changelog((_ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, rehearsal=options.rehearsal)
        if not options.rehearsal:
            check_committed(_ROOT)
        _report(f"version {version}{', a rehearsal: do not upload these archives' if options.rehearsal else ''}")
        pythons = {} if options.build_only else _pythons(options.python or supported)
        wheel = _built(version, options.output)
        if pythons:
            _use(wheel, pythons, supported)
    except ReleaseError as exc:
        print(f"Error: {exc}", file=sys.stderr)
        if exc.hint:
            print(f"hint: {exc.hint}", file=sys.stderr)
        return 1
    return 0


def _pythons(versions: Sequence[str]) -> dict[str, Path | str]:
    """Return version → interpreter, or the reason why there is none.  Errors: ReleaseError when there is no one."""
    pythons = {each: find_python(each) for each in versions}
    if not any(isinstance(python, Path) for python in pythons.values()):
        reasons = "; ".join(map(str, pythons.values()))
        raise ReleaseError(f"expected at least one Python of {', '.join(versions)} on this machine: {reasons}")
    return pythons


def _built(version: str, out: Path) -> Path:
    """Build and check the archives; return the wheel that pip prefers on this machine."""
    archives = build(_ROOT, out)
    for archive in archives.files:
        _report(f"built {archive} ({archive.stat().st_size / 1e6:.1f} MB)")
    check_metadata(archives)
    tracked = tracked_files(_ROOT)
    check_sdist(archives.sdist, tracked, version)
    for wheel in archives.wheels:
        check_wheel(wheel, tracked, version)
    _report("checked metadata and contents")
    here = f"_{platform.machine()}.whl"
    return next((wheel for wheel in archives.wheels if wheel.name.endswith(here)), archives.wheels[0])


def _use(wheel: Path, pythons: dict[str, Path | str], supported: Sequence[str]) -> None:
    used = []
    for each, python in pythons.items():
        if isinstance(python, str):
            _report(f"Python {each}: NOT TRIED: {python}")
            continue
        begin = time.monotonic()
        _report(f"Python {each}: installing the wheel; the first time downloads PyTorch")
        with tempfile.TemporaryDirectory(prefix=f"gmmvit-release-{each}-") as folder:
            result = use_wheel(python, wheel, _ROOT / _CHECKPOINT, Path(folder) / "use")
        _report(f"Python {each}: {result} ({time.monotonic() - begin:.0f} s)")
        used.append(each)
    tried = f"used with Python {', '.join(used)}"
    untried = [each for each in supported if each not in used]
    _report(f"{tried}; NOT TRIED with {', '.join(untried)}" if untried else f"{tried}, all that are supported")


def _report(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
