"""What a client needs for a server: its address, a key, and the certificate authorities that it trusts."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from gmmvit_deploy.errors import InputError

_KEY_HINT = "write the key alone on a line of the file; lines that begin with # are comments"
_MAX_FILE_BYTES = 4 * 2**20
_PORTS = {"http": 8000, "grpc": 8001, "https": 443, "grpcs": 443}
"""Scheme → default port: Triton's own ports, and the port of HTTPS for a connection with TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A client's key and trusted certificates.

    key: sent with every request as ``Authorization: Bearer KEY``; empty for a server without keys.
    key_path: the file of the key, for messages; None without a key.
    ca_path: a PEM file of the certificate authorities that the client trusts; None to trust the public authorities.
    """

    key: str = field(default="", repr=False)
    key_path: Path | None = None
    ca_path: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of HTTP requests, and the metadata of gRPC requests, whose names must be lower case."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


NO_ACCESS = Access()
"""No key, and the public certificate authorities."""


def open_access(*, key_file: Path | None = None, ca: Path | None = None) -> Access:
    """Read a key file, and check a file of certificates.

    key_file: a file with the key alone on a line; empty lines and lines that begin with ``#`` are ignored.
    ca: a PEM file with at least one certificate.
    Errors: InputError when a file cannot be read or has another content.
    """
    if ca is not None:
        _require_certificates(ca)
    key = _key_from(key_file) if key_file is not None else ""
    return Access(key=key, key_path=key_file, ca_path=ca)


def _key_from(path: Path) -> str:
    lines = [line.strip() for line in _text(path, "a key").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    # The messages never quote the file, because logs must not contain keys.
    if len(lines) != 1:
        raise InputError(f"{path}: expected a single line with a key, got {len(lines)} lines", hint=_KEY_HINT)
    if len(lines[0].split()) == 2:
        raise InputError(
            f"{path}: expected a key alone on a line, got two words; the server's key file has lines NAME KEY, the "
            "client's key file has only the key",
            hint=_KEY_HINT,
        )
    if re.fullmatch(r"[\x21-\x7e]+", lines[0]) is None:  # other characters cannot stand in a header
        raise InputError(f"{path}: expected a key of visible ASCII characters without spaces", hint=_KEY_HINT)
    return lines[0]


def _require_certificates(path: Path) -> None:
    text = _text(path, "certificates in PEM form")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as exc:
        raise InputError(
            f"{path}: expected certificates in PEM form, with lines BEGIN CERTIFICATE and END CERTIFICATE",
            hint="type --ca and the file of the certificate authority, or of the server's self-signed certificate",
        ) from exc


def _text(path: Path, expected: str) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{path}: expected a file with {expected}, got {path.stat().st_size} bytes")
        return path.read_text(encoding="ascii" if expected == "a key" else "utf-8")
    except OSError as exc:
        raise InputError(f"{path}: expected a file with {expected}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"{path}: expected a file with {expected}, got bytes that are not text") from exc


class ServerUrl(NamedTuple):
    """A server's address.  address: ``host:port``.  tls: True for ``https://`` and ``grpcs://``."""

    protocol: Literal["grpc", "http"]
    address: str
    tls: bool

    @property
    def is_loopback(self) -> bool:
        """True if the host is this machine, so that requests leave no network interface."""
        return re.match(r"(localhost|127\.[\d.]+|\[::1\]):", self.address) is not None


def parse_url(url: str) -> ServerUrl:
    """Split a server's address: ``grpc://host:port`` or ``http://host:port``; with TLS, ``grpcs://`` or ``https://``.

    The default port is 8001 for gRPC, 8000 for HTTP, and 443 with TLS.
    Errors: InputError when the address has another form.
    """
    match = re.fullmatch(r"(grpcs?|https?)://(\[[0-9a-fA-F:]+\]|[^:/\[\]]+)(?::(\d{1,5}))?/?", url)
    if match is None:
        raise InputError(
            f"{url!r} is not a server address",
            hint="type grpc://HOST:PORT or http://HOST:PORT, for example grpc://localhost:8001; with TLS, "
            "grpcs://HOST:PORT or https://HOST:PORT",
        )
    scheme = match.group(1)
    return ServerUrl(
        protocol="grpc" if scheme.startswith("grpc") else "http",
        address=f"{match.group(2)}:{match.group(3) or _PORTS[scheme]}",
        tls=scheme.endswith("s"),
    )


def protocol_of(url: str) -> str:
    """Return ``grpc`` or ``http``, with or without TLS; for any other address, the text before its first colon."""
    scheme = url.partition(":")[0]
    return scheme.removesuffix("s") if scheme in _PORTS else scheme
