"""The options of a client of a server behind a gateway: its key, the certificates that it trusts, the address."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gmmvit_cli.options import TARGET
from gmmvit_deploy.errors import InputError

if TYPE_CHECKING:
    from gmmvit_deploy.runtimes.programs.access import Access

__all__ = ["CA", "KEY_FILE", "URL_VARIABLE", "access_from", "default_urls"]

URL_VARIABLE = "GMMVIT_URL"
_KEY_VARIABLE = "GMMVIT_KEY_FILE"
_CA_VARIABLE = "GMMVIT_CA"


def _existing(option: str, variable: str) -> Callable[[Path | None], Path | None]:
    def check(path: Path | None) -> Path | None:
        if path is not None and not path.is_file():
            raise InputError(
                f"{option} {path}: no such file",
                hint=f"type {option} and a file that exists, or set or unset {variable}",
            )
        return path

    return check


KEY_FILE = typer.Option(
    None,
    "--key-file",
    metavar="FILE",
    rich_help_panel=TARGET,
    envvar=_KEY_VARIABLE,
    show_envvar=False,
    show_default=f"the variable {_KEY_VARIABLE}",
    callback=_existing("--key-file", _KEY_VARIABLE),
    help="File with the key for the server's gateway, alone on a line.",
)
CA = typer.Option(
    None,
    "--ca",
    metavar="FILE",
    rich_help_panel=TARGET,
    envvar=_CA_VARIABLE,
    show_envvar=False,
    show_default=f"the variable {_CA_VARIABLE}, else the public authorities",
    callback=_existing("--ca", _CA_VARIABLE),
    help="PEM file of the certificate authority to trust for grpcs:// and https://.",
)


def access_from(key_file: Path | None, ca: Path | None) -> Access:
    """Read the files of ``--key-file`` and ``--ca``.  Errors: InputError when a file has another content."""
    from gmmvit_deploy.runtimes.programs.access import open_access

    # gRPC would print a line of its own beside the error, for a certificate that is not trusted. Read at its import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return open_access(key_file=key_file, ca=ca)


def default_urls(urls: Sequence[str], runners: Sequence[str]) -> Sequence[str]:
    """Return ``--url``; without it, the address of the variable GMMVIT_URL if a runner uses its protocol."""
    from gmmvit_deploy.runtimes.programs.access import protocol_of

    url = os.environ.get(URL_VARIABLE, "")
    return urls or ([url] if f"triton-{protocol_of(url)}" in runners else [])
