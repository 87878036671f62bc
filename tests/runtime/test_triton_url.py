from __future__ import annotations

import pytest

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtime.triton import parse_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("grpc://localhost:9001", ("grpc", "localhost:9001")),
        ("http://10.0.0.1:80/", ("http", "10.0.0.1:80")),
        ("grpc://host", ("grpc", "host:8001")),
        ("http://host", ("http", "host:8000")),
        ("http://[::1]:8000", ("http", "[::1]:8000")),
    ],
)
def test_addresses(url: str, expected: tuple[str, str]) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize("url", ["localhost:8001", "https://host", "grpc://", "grpc://host:port", "http://host/v2", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_url(url)
    assert "grpc://localhost:8001" in caught.value.hint
