"""Mistakes of operators: an expired certificate, a key file that everybody reads, addresses and ports of others."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gmmvit_deploy.errors import InputError, OutputError
from gmmvit_deploy.runtime.access import Access
from gmmvit_deploy.runtime.triton_errors import Request, error_from_transport
from gmmvit_deploy.serving.gateway.access_log import AccessLog
from gmmvit_deploy.serving.gateway.expiry import expiry_of
from gmmvit_deploy.serving.gateway.files import tls_pem
from gmmvit_deploy.serving.gateway.keys import readable_by_others
from gmmvit_deploy.serving.gateway.options import GatewaySettings
from gmmvit_deploy.serving.server_log import ServerLog, stamped
from tests.certificates import self_signed
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


@pytest.mark.parametrize("days", [1, 20_000])  # the form of the date changes in 2050
def test_expiry_is_that_of_the_certificate(days: int, tmp_path: Path) -> None:
    pem = self_signed(tmp_path, days=days).both.read_text()
    left = expiry_of(pem) - datetime.now(timezone.utc)
    assert timedelta(0) <= timedelta(days=days) - left < timedelta(minutes=1)


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
