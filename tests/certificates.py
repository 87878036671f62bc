"""Certificates for servers of tests: self-signed, for 127.0.0.1 only, made on demand."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """certificate: what clients trust, PEM.  private_key: PEM.  both: a file with both, as HAProxy reads it."""

    certificate: Path
    private_key: Path
    both: Path


def self_signed(folder: Path, name: str = "server", *, days: int = 1) -> Certificate:
    """Write a certificate for 127.0.0.1 that is its own authority.  It does not name localhost.

    days: the time until it expires; a negative number makes a certificate that has expired.
    """
    private_key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private_key, hashes.SHA256())
    )
    certificate_pem = certificate.public_bytes(serialization.Encoding.PEM)
    key_pem = private_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    written = Certificate(
        certificate=folder / f"{name}.crt", private_key=folder / f"{name}.key", both=folder / f"{name}.pem"
    )
    written.certificate.write_bytes(certificate_pem)
    written.private_key.write_bytes(key_pem)
    written.both.write_bytes(certificate_pem + key_pem)
    return written
