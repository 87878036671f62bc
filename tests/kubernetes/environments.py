"""Environments with exactly the packages of an image: any other package, such as torch, cannot be imported there."""

from __future__ import annotations

import venv
from importlib.metadata import distribution
from pathlib import Path

import gmmvit_cli
import gmmvit_deploy

__all__ = ["linked_environment"]


def linked_environment(folder: Path, names: list[str]) -> Path:
    """Make an environment of links to the files of these distributions and of this package.  Returns its Python."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in names:
        package = distribution(name)
        for file in package.files or ():
            top = file.parts[0]
            source = Path(str(package.locate_file(top)))
            if top not in ("..", "__pycache__") and not (site / top).exists() and source.exists():
                (site / top).symlink_to(source)
    own = Path(str(distribution("gmmvit-deploy").locate_file("")))
    for info in own.glob("gmmvit_deploy-*.dist-info"):  # its version is part of the plan of bulk work
        (site / info.name).symlink_to(info)
    for module in (gmmvit_deploy, gmmvit_cli):
        source = Path(str(module.__file__)).parent
        (site / source.name).symlink_to(source)
    return folder / "bin" / "python3"
