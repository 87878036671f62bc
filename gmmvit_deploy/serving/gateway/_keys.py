"""Read the key file of the gateway, and write the map of hashes that HAProxy looks up.

A key file has a line ``NAME KEY`` for each client, or ``NAME KEY models=MODEL,…`` for a client that may use only these
models. ``#`` begins a comment. A name may have several keys, so that a client can change to a new key before the old
key is removed. ``sha256:HEX`` in place of a key is the SHA-256 of the key: the file then holds no key itself.

Clients send ``Authorization: Bearer KEY``. HAProxy hashes the key and looks the hash up, so HAProxy's memory, its map
and the time of a look-up do not reveal keys.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.serving.options import RepositoryOptions

MIN_KEY_LENGTH = 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_KEY_LENGTH},512}}=*")  # RFC 6750: the characters of a bearer token
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MAKE = "write a line NAME KEY for each client; type openssl rand -hex 32 to make a key"


@dataclass(frozen=True, slots=True)
class Client:
    """models: the models of Triton that the client may use; None for all."""

    name: str
    models: tuple[str, ...] | None = None


def read_keys(path: Path) -> dict[str, Client]:
    """Return SHA-256 of the key, in upper-case hexadecimal digits → client.

    Errors: InputError, whose message contains no key.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "the file is not UTF-8 text"
        raise InputError(f"{path}: the key file cannot be read: {reason}", hint=_MAKE) from exc
    keys: dict[str, Client] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"{path}:{number}"
        if len(words) != 2 and not (len(words) == 3 and words[2].startswith("models=")):
            raise InputError(
                f"{place}: expected NAME KEY, got a line of {len(words)} word{'s' if len(words) > 1 else ''}",
                hint=_MAKE,
            )
        name, digest = words[0], _digest(words[1], place)
        if not _NAME.fullmatch(name):
            raise InputError(f"{place}: expected a name of 1 to 64 letters, digits, '.', '_' or '-', got {name!r}")
        client = Client(name, _permitted(words[2], place) if len(words) == 3 else None)
        if keys.setdefault(digest, client) != client:
            before = keys[digest].name
            raise InputError(f"{place}: {name} has the same key as {before}", hint="make a key for each client")
    if not keys:
        raise InputError(f"{path}: expected at least a line NAME KEY, got no key", hint=_MAKE)
    return keys


def _permitted(word: str, place: str) -> tuple[str, ...]:
    try:
        options = [RepositoryOptions(name=name) for name in word.removeprefix("models=").split(",")]
    except InputError as exc:
        raise InputError(f"{place}: {exc}", hint="write models=NAME,NAME without spaces") from exc
    return tuple(model for each in options for model in each.models)


def readable_by_others(path: Path) -> bool:
    """Return whether users other than the owner may read the key file."""
    return bool(path.stat().st_mode & 0o044)


def _digest(key: str, place: str) -> str:
    if match := _HASH.fullmatch(key):
        return match[1].upper()
    if not _KEY.fullmatch(key):
        raise InputError(
            f"{place}: expected a key of {MIN_KEY_LENGTH} to 512 letters, digits or -._~+/, or sha256:HEX, "
            f"got {len(key)} characters",
            hint=_MAKE,
        )
    return hashlib.sha256(key.encode()).hexdigest().upper()


def map_of_keys(keys: Mapping[str, Client]) -> dict[str, str]:
    """Return what HAProxy looks up: hash → name of the client.

    Of a client that may use only some models, ``:`` follows the name, and ``HASH:MODEL`` is there for each of them.
    """
    entries = {}
    for digest, client in keys.items():
        entries[digest] = client.name if client.models is None else f"{client.name}:"
        entries |= {f"{digest}:{model}": client.name for model in client.models or ()}
    return entries


def map_text(entries: Mapping[str, str]) -> str:
    """Return a map file of HAProxy."""
    return "".join(f"{key} {value}\n" for key, value in entries.items())
