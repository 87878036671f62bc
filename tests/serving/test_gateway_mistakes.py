"""Mistakes of operators: an expired certificate, a key file that everybody reads, addresses and ports of others."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import numpy as np
import pytest

from gmmvit_deploy.errors import InputError, OutputError, ServerError
from gmmvit_deploy.runtimes.programs.access import Access
from gmmvit_deploy.runtimes.programs.triton_errors import Request, error_from_transport
from gmmvit_deploy.serving.front.options import BUNDLE_HEADER, FrontOptions
from gmmvit_deploy.serving.front.triton_http import Triton
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


def test_the_answer_of_a_server_that_ends_is_asked_for_again() -> None:
    """A rollout is aborted between the answer of the new server and the question for the labels of that answer."""
    canary = iter([True])
    configs = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            configs.append(request.url.path)
            texts = {"labels": json.dumps(["cat", "dog"]), "gmmvit_bundle_sha256": "old"}
            parameters = {name: {"string_value": text} for name, text in texts.items()}
            config = {"parameters": parameters, "max_batch_size": 8, "output": [{"name": "logits"}]}
            return httpx.Response(200, json=config)
        header = json.dumps({"outputs": [{"name": "logits", "datatype": "FP32", "shape": [1, 2]}]}).encode()
        bundle = "new" if next(canary, False) else "old"
        headers = {"Inference-Header-Content-Length": str(len(header)), BUNDLE_HEADER: bundle}
        return httpx.Response(200, content=header + np.float32([1, 2]).tobytes(), headers=headers)

    async def asked() -> None:
        async with Triton(FrontOptions(triton_url="http://127.0.0.1:1")) as triton:
            await triton._client.aclose()
            triton._client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:1")
            logits, model = await triton.answer([b"image"])
            assert (model.bundle, logits.tolist()) == ("old", [[1, 2]])

    asyncio.run(asked())
    assert len(configs) > 1


def test_a_connection_that_breaks_is_replaced() -> None:
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        connections.append(writer)
        if len(connections) == 2:
            texts = {"labels": json.dumps(["cat", "dog"]), "gmmvit_bundle_sha256": "ab"}
            parameters = {name: {"string_value": text} for name, text in texts.items()}
            body = json.dumps({"parameters": parameters, "max_batch_size": 8, "output": [{"name": "logits"}]})
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    async def asked() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with Triton(FrontOptions(triton_url=f"http://127.0.0.1:{port}")) as triton:
                assert (await triton.model()).bundle == "ab"

    asyncio.run(asked())
    assert len(connections) == 2
