"""Send requests at fixed times, whether or not earlier requests have their answers, each with a deadline.

An open loop shows what many independent clients see: a closed loop, in which a client waits for its answer, slows down
together with the server and hides an overload.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np

from tests.serving import stand_in

KEY = "key-of-the-benchmark-0123456789"


@dataclass(frozen=True, slots=True)
class Outcome:
    """due_s: when the request was due, from the start of the run.  seconds: until the answer, from that time.
    status: ``OK``, the status of the refusal, or ``DEADLINE`` if the client gave up.
    """

    due_s: float
    seconds: float
    status: str


Send = Callable[[float], Awaitable[str]]
"""Sends a request with a deadline in seconds, and returns its status."""


async def open_loop(send: Send, due: Iterable[float], *, deadline_s: float) -> list[Outcome]:
    """Send a request at each of the times ``due``, in seconds, from which its deadline counts; return the outcomes."""
    start = time.perf_counter()

    async def ask(due_s: float) -> Outcome:
        left = deadline_s - (time.perf_counter() - start - due_s)
        try:
            status = await asyncio.wait_for(send(left), max(left, 0.001))
        except TimeoutError:
            status = "DEADLINE"
        return Outcome(due_s, time.perf_counter() - start - due_s, status)

    tasks = []
    for due_s in due:
        await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - start)))
        tasks.append(asyncio.create_task(ask(due_s)))
    return list(await asyncio.gather(*tasks))


def message() -> bytes:
    """Return a serialised request with a single image."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=stand_in.NETWORK)
    request.inputs.add(name="pixels", datatype="UINT8", shape=[1, *stand_in.SHAPE])
    request.raw_input_contents.append(np.zeros(stand_in.SHAPE, np.uint8).tobytes())
    return bytes(request.SerializeToString())


def http_request(port: int) -> tuple[bytes, bytes]:
    """Return (head, body) of a request with a single image in Triton's raw form."""
    body = np.zeros(stand_in.SHAPE, np.uint8).tobytes()
    lines = [
        f"POST /v2/models/{stand_in.NETWORK}/infer HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        f"Authorization: Bearer {KEY}",
        "Inference-Header-Content-Length: 0",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode(), body


async def closed_loop(send: Send, *, clients: int, seconds: float) -> float:
    """Return the answers a second of clients that each wait for their answer."""
    end, answers = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal answers
        while time.perf_counter() < end:
            status = await send(10.0)
            answers += status == "OK"

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return answers / (time.perf_counter() - started)


def grpc_sender(channel: grpc.aio.Channel, message: bytes, metadata: Sequence[tuple[str, str]]) -> Send:
    """Return a sender of an inference over gRPC; ``message`` is a serialised ModelInferRequest."""
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    async def send(deadline_s: float) -> str:
        try:
            await infer(message, timeout=max(deadline_s, 0.001), metadata=tuple(metadata))
        except grpc.aio.AioRpcError as exc:
            return "DEADLINE" if exc.code() == grpc.StatusCode.DEADLINE_EXCEEDED else exc.code().name
        return "OK"

    return send


class http_sender:  # noqa: N801 - used as a function, like grpc_sender
    """Sends an inference over HTTP/1.1 on kept connections, of which it opens more when all are in use."""

    def __init__(self, host: str, port: int, head: bytes, body: bytes) -> None:
        self._place, self._request = (host, port), head + body
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __call__(self, deadline_s: float) -> str:
        reader, writer = self._kept() or await asyncio.open_connection(*self._place)
        whole = False
        try:
            writer.write(self._request)
            head = await reader.readuntil(b"\r\n\r\n")
            fields = head.lower().split(b"\r\n")
            length = next(int(field[15:]) for field in fields if field.startswith(b"content-length:"))
            await reader.readexactly(length)
            whole = b"connection: close" not in fields
        except (asyncio.IncompleteReadError, ConnectionError):
            return "CLOSED"
        finally:  # also when the deadline cancels this task
            if whole:
                self._idle.append((reader, writer))
            else:
                writer.close()
        status = int(fields[0].split()[1])
        return "OK" if status == 200 else str(status)

    def _kept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Return a kept connection that the server has not closed; uvicorn closes an idle connection after 5 s."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        return None

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


def summary(outcomes: Sequence[Outcome], *, seconds: float) -> dict[str, Any]:
    """Return the rates of answers and refusals, and their times in milliseconds."""
    statuses = sorted({outcome.status for outcome in outcomes})
    answered = [outcome.seconds for outcome in outcomes if outcome.status == "OK"]
    refused = [outcome.seconds for outcome in outcomes if outcome.status not in ("OK", "DEADLINE")]
    return {
        "requests": len(outcomes),
        "answered_per_second": len(answered) / seconds,
        "slowest_answer_ms": max(answered, default=0.0) * 1000,
        "slowest_refusal_ms": max(refused, default=0.0) * 1000,
        "statuses": {status: sum(outcome.status == status for outcome in outcomes) for status in statuses},
    }
