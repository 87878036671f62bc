from __future__ import annotations

import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.programs.server_url import parse_url, protocol_of


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("grpc://localhost:9001", ("grpc", "localhost:9001", False)),
        ("http://10.0.0.1:80/", ("http", "10.0.0.1:80", False)),
        ("grpc://host", ("grpc", "host:8001", False)),
        ("http://host", ("http", "host:8000", False)),
        ("http://[::1]:8000", ("http", "[::1]:8000", False)),
        ("https://host", ("http", "host:443", True)),
        ("grpcs://host", ("grpc", "host:443", True)),
        ("grpcs://[::1]:9001/", ("grpc", "[::1]:9001", True)),
    ],
)
def test_addresses(url: str, expected: tuple[str, str, bool]) -> None:
    assert parse_url(url) == expected
    assert protocol_of(url) == expected[0]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8001",
        "ftp://host",
        "grpc://",
        "grpc://host:port",
        "http://host/v2",
        "https://host/v2",
        "httpss://a",
        "",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_url(url)
    assert "grpc://localhost:8001" in caught.value.hint


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://localhost", True),
        ("grpcs://127.0.0.1:1", True),
        ("http://[::1]", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example.org", False),
        ("http://127.0.0.1.example.org", False),
    ],
)
def test_addresses_of_this_machine(url: str, loopback: bool) -> None:
    assert parse_url(url).is_loopback == loopback
