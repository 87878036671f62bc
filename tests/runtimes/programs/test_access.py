"""Addresses, key files and certificate files: what is read, and what is refused, with messages that show no key."""

from __future__ import annotations

from pathlib import Path

import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.programs.access import NO_ACCESS, Access, open_access, parse_url, protocol_of
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from tests.certificates import self_signed


@pytest.mark.parametrize("text", ["secret-1", "secret-1\n", "# alice\n\n  secret-1  \r\n"])
def test_a_key(text: str, tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text(text)
    access = open_access(key_file=tmp_path / "key.txt")
    assert access.headers == {"authorization": "Bearer secret-1"}
    assert "secret-1" not in repr(access)


def test_no_key() -> None:
    assert open_access() == NO_ACCESS
    assert NO_ACCESS.headers == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a single line with a key, got 0 lines"),
        (b"secret\nsecret\n", "got 2 lines"),
        (b"alice secret\n", "the server's key file has lines NAME KEY"),
        (b"a secret of words\n", "visible ASCII characters without spaces"),
        ("sécret\n".encode(), "got bytes that are not text"),
    ],
    ids=range(5),  # the folder of the test has the name of the test
)
def test_what_is_no_key(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_bytes(content)
    with pytest.raises(InputError, match=r"key\.txt") as caught:
        open_access(key_file=tmp_path / "key.txt")
    assert message in str(caught.value)
    assert "secret" not in str(caught.value) + caught.value.hint


def test_a_key_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="expected a file with a key: "):
            open_access(key_file=path)


def test_certificates(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    assert open_access(ca=certificate.certificate).ca_path == certificate.certificate
    for content in (b"", b"no certificate", certificate.private_key.read_bytes(), b"\xff\xfe\x00"):
        (tmp_path / "wrong.pem").write_bytes(content)
        with pytest.raises(InputError, match=r"wrong\.pem: expected a?\s?.*certificates in PEM form"):
            open_access(ca=tmp_path / "wrong.pem")


@pytest.mark.parametrize("url", ["http://10.0.0.1", "grpc://host:8001"])
def test_a_key_leaves_this_machine_only_encrypted(url: str) -> None:
    access = Access(key="secret", key_path=Path("key.txt"))
    with pytest.raises(InputError, match=r"the key of key\.txt would be sent to another machine without") as caught:
        TritonConnection(url, access=access)
    assert "https:// or grpcs://" in caught.value.hint
    for allowed in ("http://127.0.0.1:1", "grpc://localhost:1", "https://10.0.0.1", "grpcs://host"):
        TritonConnection(allowed, access=access).close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("grpc://localhost:9001", ("grpc", "localhost:9001", False)),
        ("http://10.0.0.1:80/", ("http", "10.0.0.1:80", False)),
        ("grpc://host", ("grpc", "host:8001", False)),
        ("http://host", ("http", "host:8000", False)),
        ("https://host", ("http", "host:443", True)),
        ("grpcs://[::1]:9001/", ("grpc", "[::1]:9001", True)),
    ],
)
def test_addresses(url: str, expected: tuple[str, str, bool]) -> None:
    assert parse_url(url) == expected
    assert protocol_of(url) == expected[0]


@pytest.mark.parametrize("url", ["localhost:8001", "ftp://host", "grpc://", "grpc://host:port", "http://host/v2", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_url(url)
    assert "grpc://localhost:8001" in caught.value.hint
