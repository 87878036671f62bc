"""The front's connections to Triton, with a stand-in that answers as a broken or another server."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gmmvit_deploy.serving.front._triton import Triton
from gmmvit_deploy.serving.front._uploads import Refusal
from gmmvit_deploy.serving.front.options import FrontOptions

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


def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async def ask(triton: Triton, asked: list[str]) -> tuple[list[Any], list[str]]:
        await triton.model("gmmvit")
        both = [triton.answers("gmmvit", [b"image"] * 2, ["logits"]) for _ in range(2)]
        return [answers["logits"].tolist() for answers in await asyncio.gather(*both)], asked

    twice = [values(1, 2, 3, 4, shape=(2, 2))] * 2
    rows, asked = with_server(twice, ask)
    assert rows == [[[1, 2], [3, 4]]] * 2
    assert asked.count("connected") == 2
