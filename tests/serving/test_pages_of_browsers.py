"""Pages of the web in a browser of this machine, which can send requests to loopback: what they reach of Triton.

The page's host has the address of loopback, so that Chromium does not ask its user for permission, as it does before a
page of another address asks loopback. A page with DNS rebinding has the host and the port of the server itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gmmvit_deploy.serving.repository import Repository
from gmmvit_deploy.serving.server import TritonServer
from tests.browser import open_chromium
from tests.haproxy import needs_haproxy
from tests.serving.commands import metric_values
from tests.serving.gateways import request, running_service
from tests.serving.stand_in import MODEL, infer_body
from tests.serving.test_published_faults import REGISTER, own_region, region_request
from tests.waiting import wait_until

pytestmark = pytest.mark.integration
INFER = f"/v2/models/{MODEL}/infer"
READABLE = """async ([url, body, headers, mode]) => {
    try {
        const answer = await fetch(url, {method: body === null ? "GET" : "POST", body, headers, mode});
        return answer.type === "opaque" ? "sent" : answer.status;
    } catch (error) {
        return "refused";
    }
}"""
"""What the script of a page learns: the status of an answer, "sent" for an answer that it may not read, "refused"."""


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>page</title>")

    def log_message(self, *_: object) -> None:
        """Write no line for a request."""


@contextmanager
def page_at(url: str = "") -> Iterator[Any]:
    """Yield a page of another origin, or with DNS rebinding: of a name that leads to the server at ``url``."""
    web = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with open_chromium("--no-sandbox", "--host-resolver-rules=MAP evil.example 127.0.0.1") as browser:
            page = browser.new_page()
            page.goto(f"http://evil.example:{urlsplit(url).port if url else web.server_address[1]}/v2")
            yield lambda url, body=None, headers=None, mode="cors": page.evaluate(
                READABLE, [url, body if body is None else body.decode(), headers or {}, mode]
            )
    finally:
        web.shutdown()
        web.server_close()


def answered(server: TritonServer) -> float:
    return sum(metric_values(server.metrics_url, "nv_inference_request_success").values())


def uses_region(server: TritonServer) -> str:
    """Return Triton's answer to an inference from the region of `REGISTER`."""
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "parameters": parameters}]}
    return request(server.http_url, INFER, json.dumps(body).encode()).body.decode()


def test_a_page_changes_nothing_and_reads_nothing(stand_in: TritonServer) -> None:
    url, pid, before = stand_in.http_url, stand_in.pid, answered(stand_in)
    plain = {"Content-Type": "text/plain"}
    with page_at() as ask:
        register = region_request(own_region(pid))
        assert ask(url + REGISTER, register, plain, "no-cors") == "sent"
        assert "Unable to find shared memory region: 'r'" in uses_region(stand_in)
        # Headers that Triton must know, for compressed and for binary bodies, need Triton's consent.
        for name, value in (("Content-Encoding", "gzip"), ("Inference-Header-Content-Length", "0")):
            assert ask(url + INFER, infer_body(1), {name: value}) == "refused"
        assert ask(url + "/v2") == "refused"
        assert ask(f"http://127.0.0.1:{stand_in.metrics_port}/metrics") == "refused"
        assert (
            ask(f"http://127.0.0.1:{stand_in.grpc_port}/inference.GRPCInferenceService/ModelInfer", b"a") == "refused"
        )
        assert answered(stand_in) == before
        assert ask(url + INFER, infer_body(1), plain) == "refused"
        # Computed, and not shown to the page. Triton counts an answer after it has sent it.
        wait_until(lambda: answered(stand_in) == before + 1, "an answer that Triton counts")
    stand_in.require_running()
    assert stand_in.pid == pid


def test_a_page_with_dns_rebinding_reads_answers_and_changes_nothing(stand_in: TritonServer) -> None:
    with page_at(stand_in.http_url) as ask:
        assert ask(INFER, infer_body(1)) == 200
        assert ask(REGISTER, region_request(own_region(stand_in.pid))) == 403
        assert ask("/v2/logging", b'{"log_info": false}') == 403
        assert ask("/v2/repository/models/stand_in/unload", b"{}") == 403
    assert "Unable to find shared memory region: 'r'" in uses_region(stand_in)


@needs_haproxy
@pytest.mark.parametrize("rebinding", [False, True], ids=["page", "rebinding"])
def test_a_page_reaches_nothing_behind_a_gateway(repository: Repository, tmp_path: Path, rebinding: bool) -> None:
    with running_service(repository.path, tmp_path) as service:
        url = service.http_url
        with page_at(url if rebinding else "") as ask:
            for path in ("/v2/models/gmmvit_network/infer", "/classify", "/v2"):
                assert ask(path if rebinding else url + path, infer_body(1)) == (401 if rebinding else "refused")
        assert request(url, "/v2/health/ready").status == 200
        log = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
        assert {line["status"] for line in log if line["method"] == "POST"} == {401}
