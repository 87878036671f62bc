"""Parse the options of a script, with ``--check`` for a run of seconds that writes no result."""

from __future__ import annotations

import argparse
import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.places import RESULTS, result_of


def script_parser(description: str | None, script: str, *, suffix: str = ".json") -> argparse.ArgumentParser:
    """Return the parser of a script, with ``--output``.  suffix: as for `result_of`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = "the result" if suffix else "folder for the results"
    parser.add_argument("--output", type=Path, default=result_of(script, suffix=suffix), help=what)
    return parser


def parsed(parser: argparse.ArgumentParser, *, check: str = "run once", **smallest: Any) -> argparse.Namespace:
    """Add ``--check``, and parse the command line.

    smallest: argument → its value with ``--check``, unless one of them is given. With ``--check``, a path below
    benchmarks/results becomes a path in a folder that is removed at the end.
    """
    sizes = ", with the smallest sizes unless a size is given" if smallest else ""
    parser.add_argument("--check", action="store_true", help=f"{check}{sizes}; write no result")
    arguments = parser.parse_args()
    if not arguments.check:
        return arguments
    if all(getattr(arguments, name) == parser.get_default(name) for name in smallest):
        vars(arguments).update(smallest)
    folder = Path(tempfile.mkdtemp(prefix="gmmvit-check-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, value in vars(arguments).items():
        if isinstance(value, Path) and value.resolve().is_relative_to(RESULTS.resolve()):
            setattr(arguments, name, folder / value.name)
    return arguments
