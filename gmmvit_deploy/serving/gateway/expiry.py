"""Read when a certificate expires, without a library for certificates.  Source: RFC 5280, section 4.1; X.690 (DER)."""

from __future__ import annotations

import ssl
from datetime import datetime, timezone
from pathlib import Path

from gmmvit_deploy.errors import InputError

__all__ = ["expiry_of", "require_not_expired"]

_VERSION, _UTC_TIME = 0xA0, 0x17
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def expiry_of(pem: str) -> datetime:
    """Return the time (UTC) after which the first certificate of a PEM text is invalid.

    Errors: ValueError when the text holds no certificate.
    """
    begin = pem.index(_BEGIN)
    der = ssl.PEM_cert_to_DER_cert(pem[begin : pem.index(_END, begin) + len(_END)])
    (_, certificate), *_ = _elements(der)
    (_, body), *_ = _elements(certificate)
    fields = [content for tag, content in _elements(body) if tag != _VERSION]
    _, (tag, text) = _elements(fields[3])  # serial number, algorithm, issuer, validity = (not before, not after)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=timezone.utc)


def require_not_expired(path: Path, pem: str) -> None:
    """Refuse a file whose first certificate, which the gateway would send to clients, has expired.

    Errors: InputError that names the file and the time.
    """
    expiry = expiry_of(pem)
    if expiry <= datetime.now(timezone.utc):
        raise InputError(
            f"{path}: the certificate expired on {expiry:%Y-%m-%d} at {expiry:%H:%M} UTC, so clients would refuse it",
            hint=f"replace {path} by a new certificate; openssl x509 -noout -enddate -in {path} prints the date",
        )


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return (tag, content) of each element of a sequence."""
    elements, position = [], 0
    while position < len(der):
        tag, length, position = der[position], der[position + 1], position + 2
        if length & 0x80:
            size = length & 0x7F
            length, position = int.from_bytes(der[position : position + size], "big"), position + size
        elements.append((tag, der[position : position + length]))
        position += length
    return elements
