"""Mistakes of operators: an expired certificate, a key file that everybody reads, addresses and ports of others."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gmmvit_deploy.errors import InputError, OutputError, ServerError
from gmmvit_deploy.runtimes.programs.access import Access
from gmmvit_deploy.runtimes.programs.triton_errors import Request, error_from_transport
from gmmvit_deploy.serving.gateway.access_log import AccessLog
from gmmvit_deploy.serving.gateway.files import tls_pem
from gmmvit_deploy.serving.gateway.keys import readable_by_others
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.ports import listening_socket
from gmmvit_deploy.serving.server_log import ServerLog, stamped
from tests.certificates import self_signed
from tests.cli.terminal import gmmvit_here
from tests.serving.gateways import key_file


def test_an_expired_certificate_is_refused_with_file_and_date(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    good, old = self_signed(tmp_path, "good", days=400), self_signed(tmp_path, "old", days=-1)
    assert "BEGIN" in tls_pem(GatewaySettings(keys=keys, tls_cert=good.both))
    day = (datetime.now(timezone.utc) - timedelta(days=1)).strftime("%Y-%m-%d")
    for settings in (
        GatewaySettings(keys=keys, tls_cert=old.both),
        GatewaySettings(keys=keys, tls_cert=old.certificate, tls_key=old.private_key),
    ):
        with pytest.raises(InputError, match=rf"old\.\w+: the certificate expired on {day} at ") as caught:
            tls_pem(settings)
        assert "openssl x509 -noout -enddate" in caught.value.hint


def test_the_client_of_an_expired_certificate_asks_the_operator() -> None:
    request = Request("https://host:8000", "gmmvit", "infer", 1.0, Access())
    reason = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)"
    error = error_from_transport(OSError(reason), request)
    assert "the certificate of https://host:8000 has expired" in str(error)
    assert error.hint.startswith("ask the operator of the service for a new certificate")
    assert "--ca" in error_from_transport(OSError(reason.replace("has expired", "unknown")), request).hint


def test_keys_that_others_can_read_are_noticed(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    keys.chmod(0o644)
    assert readable_by_others(keys)
    keys.chmod(0o600)
    assert not readable_by_others(keys)


def test_a_log_in_a_folder_that_does_not_exist_names_its_option(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        AccessLog(tmp_path / "none" / "a.log", print)
    assert caught.value.hint.startswith("type --access-log ")
    with pytest.raises(OutputError) as caught:
        ServerLog(tmp_path / "none" / "a.log", None)
    assert caught.value.hint.startswith("type --log ")


def test_lines_of_the_log_begin_with_time_and_command() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ gmmvit serve: gateway: x", stamped("gateway: x"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("grpcs://localhost:8000", "type grpcs://localhost:8001, "),
        ("https://localhost:8001", "type https://localhost:8000, "),
        ("http://host:8001", "type http://host:8000, "),
        ("grpc://localhost:8001", "type gmmvit serve BUNDLE "),
        ("https://localhost:8443", "type gmmvit serve BUNDLE "),
    ],
)
def test_the_port_of_the_other_protocol_is_named(url: str, expected: str) -> None:
    error = error_from_transport(
        OSError("no HTTP/2 settings"), Request(url, "gmmvit", "get_model_config", 1.0, Access())
    )
    assert error.hint.startswith(expected)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ServerError, match=r"--listen 192\.0\.2\.1: this address is not an address of this machine"):
        listening_socket("192.0.2.1", 0, "HTTP", option="--listen")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("serve", "bundle", "--http-port", "70000"), "--http-port: expected a number in the range 0<=x<=65535"),
        (("serve", "bundle", "--queue-timeout", "0"), "--queue-timeout: expected a number in the range x>=1"),
        (("gateway", "bundle", "--max-body", "10"), "--max-body: expected a number in the range x>=1024"),
    ],
)
def test_a_number_out_of_range_is_an_invalid_command_line(typed: tuple[str, ...], message: str) -> None:
    answer = gmmvit_here(*typed)
    assert answer.status == 2
    assert message in answer.err or "greater than or equal" in answer.err or "less than or equal" in answer.err
    assert f"got '{typed[-1]}'" in answer.err


def test_serving_a_path_that_does_not_exist(tmp_path: Path) -> None:
    for options in ((), ("--gateway", "--keys", str(key_file(tmp_path)))):
        answer = gmmvit_here("serve", tmp_path / "nobundle", *options)
        assert answer.status == 1
        assert answer.err.splitlines()[-2].endswith("nobundle: no such folder")
