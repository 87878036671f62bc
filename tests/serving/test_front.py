"""The front answers ``POST /classify`` with labels, refuses what it must, and asks a real Triton server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import MissingDependencyError, ServerError
from gmmvit_deploy.runtimes.runners.classify import TritonClassifier
from gmmvit_deploy.serving.front import process as front_process
from gmmvit_deploy.serving.front._triton import Triton
from gmmvit_deploy.serving.front._uploads import Refusal
from gmmvit_deploy.serving.front.options import BUNDLE_HEADER, FRONT_HEADER, RUNNER_HEADER, FrontOptions
from gmmvit_deploy.serving.front.process import FrontProcess
from gmmvit_deploy.serving.server import TritonServer
from tests.inference.test_preprocess import encoded, photo, png
from tests.serving.commands import metric_values
from tests.serving.conftest import flat_png
from tests.serving.shared import Running
from tests.waiting import everything_was_read, wait_until

SECRET = os.urandom(16).hex()
KEY = {FRONT_HEADER: SECRET}
UNREACHABLE = FrontOptions(triton_url="http://127.0.0.1:1")
IMAGES = [encoded(photo(40, 30, seed=n), "JPEG") for n in range(3)]
MAX_BYTES = 2**20


def asked(front: FrontProcess, path: str = "/classify", **arguments: Any) -> httpx.Response:
    arguments.setdefault("headers", KEY)
    method = arguments.pop("method", "POST")
    return httpx.request(method, f"{front.url}{path}", timeout=30, trust_env=False, **arguments)


def asked_until(front: FrontProcess, status: int, **arguments: Any) -> httpx.Response:
    """Send a small image until the answer has this status, and return the answer."""

    def matching() -> list[httpx.Response]:
        return [answer for answer in (asked(front, content=IMAGES[0], **arguments),) if answer.status_code == status]

    return wait_until(matching, f"an answer with the status {status}")[0]


def unfinished(front: FrontProcess, length: int) -> socket.socket:
    """Return a connection on which a request with a body of this length has sent a byte of the body."""
    connection = socket.create_connection(("127.0.0.1", front.port), timeout=10)
    head = f"POST /classify HTTP/1.1\r\nHost: a\r\n{FRONT_HEADER}: {SECRET}\r\nContent-Length: {length}\r\n\r\na"
    connection.sendall(head.encode())
    return connection


def files(*images: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("image", (f"{n}.jpg", image)) for n, image in enumerate(images)]


@pytest.fixture(scope="module")
def front(server: Running) -> Iterator[FrontProcess]:
    options = FrontOptions(triton_url=server.http_url, max_body_bytes=MAX_BYTES, body_timeout_s=0.5)
    with FrontProcess(options, SECRET) as running:
        running.wait_ready()
        yield running


class TestAnswers:
    def test_an_image_gets_the_predictions_of_our_client(
        self, front: FrontProcess, server: Running, bundle: Bundle
    ) -> None:
        answer = asked(front, "/classify?top=3", content=IMAGES[0])
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.headers[BUNDLE_HEADER] == bundle.sha256
        assert answer.headers[RUNNER_HEADER] == server.models.runner
        with TritonClassifier(server.grpc_url) as client:
            (row,) = client.logits(IMAGES[:1])
            expected = client.label_set.predictions(row, 3)
        body = answer.json()
        assert (body["model"], body["bundle"], body["runner"]) == ("gmmvit", bundle.sha256, server.models.runner)
        (predictions,) = body["predictions"]
        assert [(guess["label"], guess["index"]) for guess in predictions] == [(g.label, g.index) for g in expected]
        assert [guess["probability"] for guess in predictions] == pytest.approx([g.probability for g in expected])

    def test_several_images_are_answered_in_their_order(self, front: FrontProcess) -> None:
        together = asked(front, "/classify?top=2", files=files(*IMAGES)).json()["predictions"]
        alone = [asked(front, "/classify?top=2", content=image).json()["predictions"][0] for image in IMAGES]
        assert len({json.dumps(predictions) for predictions in alone}) > 1
        for ours, expected in zip(together, alone, strict=True):
            assert [guess["index"] for guess in ours] == [guess["index"] for guess in expected]

    @pytest.mark.parametrize(
        "kind", [None, "image/jpeg", "application/octet-stream", "application/x-www-form-urlencoded", "IMAGE/JPEG"]
    )
    def test_types_of_an_image(self, kind: str | None, front: FrontProcess) -> None:
        headers = KEY if kind is None else {**KEY, "content-type": kind}
        assert asked(front, content=IMAGES[0], headers=headers).status_code == 200

    @pytest.mark.parametrize(("query", "count"), [("", 5), ("?top=1", 1), ("?top=10", 10), ("?top=11", 10)])
    def test_top(self, query: str, count: int, front: FrontProcess) -> None:
        (predictions,) = asked(front, f"/classify{query}", content=IMAGES[0]).json()["predictions"]
        assert len(predictions) == count
        assert [g["probability"] for g in predictions] == sorted((g["probability"] for g in predictions), reverse=True)

    def test_ready_needs_no_secret(self, front: FrontProcess) -> None:
        answer = asked(front, "/ready", method="GET", headers={})
        assert (answer.status_code, answer.json()) == (200, {"ready": True})


class TestTogether:
    """Small images of requests that arrive at the same time are sent to Triton in one request."""

    def test_each_gets_its_own_answer(self, front: FrontProcess, server: Running) -> None:
        bodies = [*IMAGES, b"text", png(1500, 1500, b""), IMAGES[0][:-200]]
        paths = [f"/classify?top={1 + number}" for number in range(len(bodies))]
        alone = [asked(front, path, content=body) for path, body in zip(paths, bodies, strict=True)]
        assert [answer.status_code for answer in alone] == [200, 200, 200, 400, 400, 400]
        for answer, expected in zip(asked_at_once(front, paths, bodies), alone, strict=True):
            assert answer.status_code == expected.status_code
            assert without_probabilities(answer) == without_probabilities(expected)

    def test_triton_gets_fewer_requests(self, front: FrontProcess, server: Running) -> None:
        def requests() -> float:
            counts = metric_values(server.metrics_url, "nv_inference_request_success")
            return sum(count for labels, count in counts.items() if 'model="gmmvit"' in labels)

        before = requests()
        answers = asked_at_once(front, ["/classify"] * 6, [*IMAGES, *IMAGES])
        assert [answer.status_code for answer in answers] == [200] * 6
        wait_until(lambda: requests() > before, "Triton has counted the request")
        assert requests() - before < 6


def asked_at_once(front: FrontProcess, paths: list[str], bodies: list[bytes]) -> list[httpx.Response]:
    """Send the requests over open connections while the front is stopped, so that it reads them at the same time."""
    connections = [http.client.HTTPConnection("127.0.0.1", front.port, timeout=30) for _ in bodies]
    for connection in connections:
        connection.request("GET", "/ready")
        connection.getresponse().read()
    os.kill(front.pid, signal.SIGSTOP)
    try:
        for connection, path, body in zip(connections, paths, bodies, strict=True):
            connection.request("POST", path, body, KEY)
    finally:
        os.kill(front.pid, signal.SIGCONT)
    answers = []
    for connection in connections:
        answer = connection.getresponse()
        answers.append(httpx.Response(answer.status, content=answer.read()))
        connection.close()
    return answers


def without_probabilities(answer: httpx.Response) -> Any:
    """Return the JSON of an answer without the probabilities, which depend on the batch in their last bits."""
    body = answer.json()
    for guess in body.get("predictions", [[]])[0]:
        del guess["probability"]
    return body


def curl(body: bytes) -> dict[str, Any]:
    return {"content": body, "headers": {**KEY, "content-type": "application/x-www-form-urlencoded"}}


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "another path": ({"path": "/v2/logging", "content": b"{}"}, 404, "send images with POST to /classify"),
    "features of a model without": ({"path": "/embed", "content": IMAGES[0]}, 400, "--outputs both"),
    "another method": ({"method": "GET"}, 405, "GET: this path takes only POST"),
    "JSON": ({"json": {"a": 1}}, 415, "expected image/*, application/octet-stream or multipart/form-data, got app"),
    "chunked": ({"content": iter([b"a", b"b"])}, 411, "must not be chunked"),
    "too large": ({"content": bytes(MAX_BYTES + 1)}, 413, f"the request is too large; the limit is {MAX_BYTES} bytes"),
    "compressed": (
        {"content": IMAGES[0], "headers": {**KEY, "content-encoding": "gzip"}},
        415,
        "compressed requests are refused",
    ),
    "empty": ({"content": b""}, 400, "image 0: the file is empty"),
    "no image": ({"content": b"text"}, 400, "image 0: the file is not a JPEG, PNG, WEBP or BMP image"),
    "cut": ({"content": IMAGES[0][:-200]}, 400, "image 0: the JPEG image is damaged or truncated"),
    "bomb": ({"content": png(8000, 8000, b"")}, 400, "image 0: the image is 8000×8000 pixels; the maximum is 50000000"),
    "second image": ({"files": files(IMAGES[0], b"text", IMAGES[1])}, 400, "image 1: the file is not a JPEG, PNG"),
    "too many images": ({"files": files(*IMAGES[:1] * 9)}, 400, "more than 8 images, the maximum in a request"),
    "too many pixels": (
        {"files": files(*[png(7000, 7000, b"")] * 5)},
        400,
        "the images of the request have 245000000 pixels; the maximum is 200000000 pixels in a request",
    ),
    "field": ({"files": {"image": IMAGES[0]}, "data": {"top": "3"}}, 400, "write top into the address"),
    "-F without @": ({"files": {"image": (None, b"photo.jpg")}}, 400, "did you mean curl -F image=@photo.jpg?"),
    "--data-binary without @": (curl(b"photo.jpg"), 400, "the text 'photo.jpg'; did you mean curl --data-binary @pho"),
    "-d": (curl(IMAGES[0].translate(None, b"\0\r\n")), 400, "line breaks; did you mean curl --data-binary @photo.jpg?"),
    "no boundary": ({"content": b"a", "headers": {**KEY, "content-type": "multipart/form-data"}}, 400, "a boundary"),
    "wrong boundary": (
        {"content": b"--b\r\n\r\n", "headers": {**KEY, "content-type": "multipart/form-data; boundary=a"}},
        400,
        "the body is not valid multipart/form-data",
    ),
    "cut form": (
        {
            "content": b'--a\r\nContent-Disposition: form-data; name="i"; filename="i"\r\n\r\nabc',
            "headers": {**KEY, "content-type": "multipart/form-data; boundary=a"},
        },
        400,
        "expected the closing boundary",
    ),
    "no secret": ({"content": IMAGES[0], "headers": {}}, 403, "answers only the gateway"),
    "wrong secret": ({"content": IMAGES[0], "headers": {FRONT_HEADER: SECRET[:-1]}}, 403, "answers only the gateway"),
    "no secret and another path": ({"path": "/docs", "method": "GET", "headers": {}}, 403, "only the gateway"),
    "top 0": (
        {"path": "/classify?top=0", "content": IMAGES[0]},
        400,
        "top: expected a whole number of at least 1, got '0'",
    ),
    "top in Arabic digits": ({"path": "/classify?top=٣", "content": IMAGES[0]}, 400, "of at least 1"),
    "long top": ({"path": f"/classify?top={'9' * 5000}", "content": IMAGES[0]}, 400, "of at least 1"),
}
"""Name → (arguments of `asked`, status, part of the error)."""


class TestRefusals:
    @pytest.mark.parametrize("name", REFUSED)
    def test_refused(self, name: str, front: FrontProcess) -> None:
        arguments, status, message = REFUSED[name]
        answer = asked(front, **arguments)
        assert answer.status_code == status, answer.text
        error = answer.json()
        assert message in error["error"]
        assert "Traceback" not in answer.text
        image = error["error"].partition(":")[0]
        assert error.get("image") == (int(image.split()[1]) if image.startswith("image ") else None)
        assert asked(front, content=IMAGES[0]).status_code == 200

    def test_a_body_that_does_not_arrive(self, front: FrontProcess) -> None:
        with unfinished(front, 100) as connection:
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 408
            assert "did not arrive within 0.5 s" in json.loads(answer.read())["error"]


class TestOverload:
    @pytest.mark.parametrize(
        ("limit", "length", "reason"),
        [
            ({"max_requests": 1}, 9, "1 requests are in progress"),
            ({"max_buffered_bytes": 5000}, 5000, "fill the memory"),
        ],
        ids=["requests", "bytes"],
    )
    def test_no_more_than_the_maximum(self, limit: dict[str, int], length: int, reason: str, server: Running) -> None:
        kinds = {"/classify": "image/jpeg", "/embed": "image/jpeg", "/v1/embeddings": "application/json"}
        with FrontProcess(FrontOptions(triton_url=server.http_url, **limit), SECRET) as front:
            front.wait_ready()
            with unfinished(front, length):
                for path, kind in kinds.items():
                    answer = asked_until(front, 503, path=path, headers={**KEY, "content-type": kind})
                    assert answer.headers["retry-after"] == "1"
                    assert reason in answer.text
            asked_until(front, 200)  # the slow client left

    @pytest.mark.nightly
    def test_an_overloaded_server_is_passed_on(self, limited_server: TritonServer) -> None:
        """While two requests of 49 million pixels wait in Triton, a third is refused with Triton's reason."""
        bomb = flat_png(7000, 7000)
        with (
            FrontProcess(FrontOptions(triton_url=limited_server.http_url), SECRET) as front,
            ThreadPoolExecutor(6) as pool,
        ):
            front.wait_ready()
            answers = [answer.result() for answer in [pool.submit(asked, front, content=bomb) for _ in range(6)]]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert {answer.status_code for answer in answers} == {200, 503}
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        assert "more than 120000000 pixels of large images would wait" in refused[0].json()["error"]

    def test_a_server_that_is_gone(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with FrontProcess(FrontOptions(triton_url=url), SECRET) as front:

            def answers() -> list[httpx.Response]:
                assert front.poll() is None
                with contextlib.suppress(httpx.TransportError):
                    return [asked(front, content=IMAGES[0])]
                return []

            (answer,) = wait_until(answers, "an answer of the front")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json() == {"error": "the server is not reachable; send the request again later"}
            assert not front.ready()
            with pytest.raises(ServerError, match="not ready after"):
                front.wait_ready(0.2)


class TestProcess:
    def test_it_writes_no_file_and_ends(self, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Starlette's own form parser would write the part of 3 MB into the temporary folder."""
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        seen: set[str] = set()
        with FrontProcess(FrontOptions(triton_url=server.http_url), SECRET) as front:
            front.wait_ready()
            done = threading.Event()

            def look() -> None:
                for link in Path(f"/proc/{front.pid}/fd").iterdir():
                    try:
                        seen.add(str(link.readlink()))
                    except OSError:
                        continue  # the descriptor was closed meanwhile

            def watch() -> None:
                while not done.is_set():
                    look()

            look()
            before = {path for path in seen if path.startswith("/")}  # such as the stderr that it inherits

            watching = threading.Thread(target=watch)
            watching.start()
            answer = asked(front, files=files(encoded(photo(1000, 1000), "BMP")))
            done.set()
            watching.join()
            assert answer.status_code == 200
            assert {path for path in seen if path.startswith("/")} == before
            pid = front.pid
        assert list(tmp_path.iterdir()) == []
        assert not Path(f"/proc/{pid}").exists()

    def test_the_secret_is_not_on_the_command_line(self, front: FrontProcess) -> None:
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{front.pid}/{name}").read_bytes()

    @pytest.mark.nightly
    def test_a_request_that_runs_is_answered_when_the_front_stops(self, server: Running) -> None:
        with FrontProcess(FrontOptions(triton_url=server.http_url), SECRET) as front:
            front.wait_ready()
            connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=30)
            connection.request("POST", "/classify", flat_png(7000, 7000), KEY)
            wait_until(lambda: everything_was_read(front.port), "the front has read the request")
            front.stop()
            assert connection.getresponse().status == 200
            connection.close()
            assert front.poll() == -signal.SIGTERM  # uvicorn answers, and then ends by the signal

    def test_an_absent_package_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(front_process, "_PACKAGES", ("no_such_package",))
        with pytest.raises(MissingDependencyError, match="no-such-package is not installed") as caught:
            FrontProcess(UNREACHABLE, SECRET)
        assert "gmmvit-deploy[serve]" in caught.value.hint


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_client_of_triton_learns_what_this_port_takes(protocol: str) -> None:
    with FrontProcess(UNREACHABLE, None) as front, pytest.raises(ServerError) as caught:
        TritonClassifier(f"{protocol}://127.0.0.1:{front.port}", retry_s=0)
    assert caught.value.hint.endswith(f"curl --data-binary @photo.jpg {front.url}/classify")


# ---- connections to Triton, with a stand-in that answers as a broken or another server -------------------------------


CONFIG = {
    "name": "gmmvit",
    "max_batch_size": 8,
    "parameters": {"gmmvit_bundle_sha256": {"string_value": "a"}, "gmmvit_task": {"string_value": "single-label"}},
    "output": [{"name": "logits", "dims": [2]}],
}


def answer(status: int, text: bytes, more: bytes = b"", head: str = "") -> bytes:
    length = f"Content-Length: {len(text) + len(more)}\r\n{head}\r\n"
    return f"HTTP/1.1 {status} Reason\r\n{length}".encode() + text + more


def values(*logits: float, shape: tuple[int, ...] = (1, 2)) -> bytes:
    tensor = struct.pack(f"<{len(logits)}f", *logits)
    size = {"binary_data_size": len(tensor)}
    text = json.dumps({"outputs": [{"name": "logits", "datatype": "FP32", "shape": shape, "parameters": size}]})
    return answer(200, text.encode(), tensor, f"Inference-Header-Content-Length: {len(text)}\r\n")


def error(status: int, text: str) -> bytes:
    return answer(status, json.dumps({"error": text}).encode())


def with_server(of_infer: list[bytes], ask: Callable[[Triton, list[str]], Awaitable[Any]]) -> Any:
    """Run ``ask`` with a connection to a server that sends these answers to requests for inference, in turn; an empty
    one closes the connection.  The list that ``ask`` gets has the paths of all requests, and "connected".
    """

    async def run() -> Any:
        asked: list[str] = []
        left = iter(of_infer)

        async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append("connected")
            text = b"first"
            while text and not text.endswith(b"half"):
                head = await reader.readuntil(b"\r\n\r\n")
                _, path, _ = head.split(b" ", 2)
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(length[0].split()[1]) if length else 0)
                asked.append(path.decode().rpartition("/")[2])
                text = answer(200, json.dumps(CONFIG).encode()) if asked[-1] == "config" else next(left)
                writer.write(text)
            writer.close()

        server = await asyncio.start_server(served, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Triton(FrontOptions(triton_url=f"http://127.0.0.1:{port}")) as triton:
            result = await ask(triton, asked)
        server.close()
        return result

    return asyncio.run(run())


async def logits(triton: Triton) -> list[float]:
    await triton.model("gmmvit")
    answers = await triton.answers("gmmvit", [b"image"], ["logits"])
    return [float(value) for value in answers["logits"][0]]


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (error(400, "in ensemble 'gmmvit', image 0: the file is empty"), 400, "image 0: the file is empty"),
        (error(400, "shared memory region /secret"), 502, "the server failed to answer"),
        (error(503, "in ensemble 'gmmvit', more pixels would wait"), 503, "more pixels would wait"),
        (error(503, "unavailable"), 503, "not reachable"),
        (error(500, "secret"), 502, "the server failed to answer"),
        (answer(200, b"{}", head="Inference-Header-Content-Length: 2\r\n"), 502, "no answer that can be read"),
        (answer(200, b"no JSON"), 502, "no answer that can be read"),
        (values(1.0, 2.0, 3.0), 502, "no answer that can be read"),
        (b"", 503, "not reachable"),
        (values(1.0, 2.0)[:-8] + b"half", 503, "not reachable"),
        (b"no HTTP\r\n\r\n", 503, "not reachable"),
    ],
    ids=lambda value: value[:30].decode() if isinstance(value, bytes) else None,
)
def test_what_a_client_gets_in_place_of_an_answer(sent: bytes, status: int, reason: str) -> None:
    with pytest.raises(Refusal) as caught:
        with_server([sent], lambda triton, _: logits(triton))
    assert caught.value.status == status
    assert reason in caught.value.reason
    assert "secret" not in caught.value.reason


def test_a_connection_is_used_again_and_its_end_is_noticed() -> None:
    """A server that is started again may have other models, so they are asked for again."""

    async def ask(triton: Triton, asked: list[str]) -> tuple[list[list[float]], list[str]]:
        rows = [await logits(triton), await logits(triton)]
        with pytest.raises(Refusal):
            await logits(triton)
        return [*rows, await logits(triton)], asked

    rows, asked = with_server([values(1, 2), values(3, 4), b"", values(5, 6)], ask)
    assert rows == [[1, 2], [3, 4], [5, 6]]
    assert asked == ["connected", "config", "infer", "infer", "infer", "connected", "config", "infer"]
