"""Send hostile requests to a service, and state what was answered."""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc

from benchmarks.hostile_service.service import Service
from tests.hostile.case import ANSWERED, CLOSED, FAILED, HANG, REFUSED, Outcome
from tests.hostile.grpc_requests import Call, images_request, sound_request
from tests.hostile.http_requests import AUTH, Held, Request

_SOUND_S = 10.0
_MAX_BYTES = 256 << 20
_REFUSED = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
}
_GONE = ("socket closed", "connection reset", "failed to connect", "goaway", "connection refused", "broken pipe")


def sound(service: Service) -> bool:
    """Return whether a sound request is answered within 10 s.  A request that is refused for overload is repeated."""
    deadline = time.monotonic() + _SOUND_S
    while (left := deadline - time.monotonic()) > 0:
        outcome = _called(service, sound_request(), service.metadata(key=True), left)
        if outcome.answer == ANSWERED:
            return True
        if outcome.answer != REFUSED:
            return False
        time.sleep(0.1)
    return False


def send_requests(service: Service, requests: Sequence[Request], *, key: bool) -> Outcome:
    """Send HTTP requests, each on a connection of its own; return the outcome of the first."""
    return [_sent(service, request, key=key) for request in requests][0]  # noqa: RUF015 - all of them are sent


def send_held(service: Service, held: Held, *, key: bool) -> Outcome:
    """Open connections that send no complete request; return the outcome of a sound request meanwhile."""
    begin = _addressed(service, held.begin).replace(AUTH, service.headers(key=key))
    connections: list[socket.socket] = []
    try:
        for _ in range(held.connections):
            connections.append(socket.create_connection(service.address(held.path), timeout=5))
            connections[-1].settimeout(2)
            try:
                connections[-1].sendall(begin)
            except OSError:
                continue  # the service does not read: it protects itself
        started = time.monotonic()
        answered = sound(service)
        seconds = time.monotonic() - started
        return Outcome(ANSWERED if answered else HANG, "a sound request meanwhile", seconds)
    except OSError as exc:
        return Outcome(REFUSED, f"connection {len(connections)}: {exc}")
    finally:
        for connection in connections:
            connection.close()


def send_images(service: Service, images: Sequence[bytes], *, key: bool) -> dict[str, Outcome]:
    """Send images to each ensemble over gRPC, and to the front; return protocol → outcome, of each model."""
    form = b"".join(
        f'--b\r\nContent-Disposition: form-data; name="i"; filename="{n}"\r\n\r\n'.encode() + image + b"\r\n"
        for n, image in enumerate(images)
    )
    body = form + b"--b--\r\n"
    kind = f"Host: localhost\r\nContent-Length: {len(body)}\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    outcomes = {}
    for model, path in service.asks.items():
        head = f"POST {path} HTTP/1.1\r\n{kind}".encode()
        outcomes[f"grpc {model}"] = send_call(service, images_request(images, model), key=key)
        outcomes[path] = _sent(service, Request(path, [head + AUTH + b"\r\n" + body]), key=key)
    return outcomes


def send_call(service: Service, call: Call, *, key: bool) -> Outcome:
    """Send the messages of a gRPC call, and then its further calls; return the most harmful outcome."""
    metadata = [*service.metadata(key=key), *call.metadata]
    outcomes = [_called(service, call, metadata, service.limit_s)]
    outcomes += [send_call(service, further, key=key) for further in call.then]
    order = (HANG, CLOSED, ANSWERED, FAILED, REFUSED)
    return min(outcomes, key=lambda outcome: order.index(outcome.answer))


def _sent(service: Service, request: Request, *, key: bool) -> Outcome:
    auth = service.headers(key=key)
    started = time.monotonic()
    try:
        with socket.create_connection(service.address(request.path), timeout=5) as connection:
            connection.settimeout(service.limit_s)
            try:
                for piece in _slices((_addressed(service, piece) for piece in request.pieces), auth):
                    if select.select([connection], [], [], 0)[0]:
                        break  # an answer before the end of the request
                    connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the answer may still be there
            head, body = _received(connection)
    except TimeoutError:
        # A service may wait for the rest of a request; it hangs if it does not answer others meanwhile.
        answer, reason = (CLOSED, "no answer: the service waits for more") if sound(service) else (HANG, "no answer")
        return Outcome(answer, f"{reason} within {service.limit_s:g} s", time.monotonic() - started)
    except OSError as exc:
        return Outcome(CLOSED, str(exc), time.monotonic() - started)
    seconds = time.monotonic() - started
    if head.startswith(b"HTTP/1.1 100 "):  # "continue" comes before the answer
        head, _, body = body.partition(b"\r\n\r\n")
    status = head.split(b" ")[1:2]
    if not head.startswith(b"HTTP/") or not status or not status[0].isdigit():
        return Outcome(CLOSED, head[:40].decode("latin-1"), seconds)
    return Outcome(_of_status(int(status[0])), f"{int(status[0])} {_text(body)}", seconds)


def _addressed(service: Service, piece: bytes) -> bytes:
    """Return a part of a request with the path of ``/classify`` in this service."""
    return re.sub(rb" /classify(?=[ ?])", f" {service.asks['gmmvit']}".encode(), piece)


def _slices(pieces: Iterable[bytes], auth: bytes) -> Iterator[bytes]:
    """Yield the pieces with the headers of the client, at most a megabyte at a time."""
    for piece in pieces:
        data = piece.replace(AUTH, auth, -1 if len(piece) < 1 << 20 else 1)
        for start in range(0, len(data), 1 << 20):
            yield data[start : start + (1 << 20)]


def _received(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return (first line and headers, start of the body); both may be empty when the connection is closed."""
    data = b""
    try:
        while b"\r\n\r\n" not in data and len(data) < 65536 and (piece := connection.recv(65536)):
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        connection.settimeout(0.5)
        while len(body) < 200 and (piece := connection.recv(65536)):
            body += piece
    except TimeoutError:
        if not data:
            raise
        head, _, body = data.partition(b"\r\n\r\n")
    except ConnectionResetError:
        head, _, body = data.partition(b"\r\n\r\n")
    return head, body


def _text(body: bytes) -> str:
    return body[:200].decode("utf-8", errors="replace").replace("\r", " ").replace("\n", " ")


def _of_status(status: int) -> str:
    if status < 400:
        return ANSWERED
    return REFUSED if status < 500 or status == 503 else FAILED


def _called(service: Service, call: Call, metadata: Sequence[tuple[str, Any]], timeout_s: float) -> Outcome:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", _MAX_BYTES)]
    options += [("grpc.enable_http_proxy", 0), ("grpc.max_metadata_size", 16 << 20)]
    compression = grpc.Compression.Gzip if call.compressed else None
    outcome = Outcome(ANSWERED, "")
    started = time.monotonic()
    with grpc.insecure_channel(service.grpc_address, options=options) as channel:
        try:
            if call.stream:
                stream = channel.stream_stream(call.method, request_serializer=None, response_deserializer=None)
                answers = list(stream(iter(call.messages), timeout=timeout_s, metadata=metadata))
                errors = [answer for answer in answers if b"pixels" in answer[:400] or b"rror" in answer[:400]]
                outcome = Outcome(REFUSED, _text(errors[0])) if errors else outcome
            else:
                unary = channel.unary_unary(call.method, request_serializer=None, response_deserializer=None)
                for message in call.messages:
                    unary(message, timeout=timeout_s, metadata=metadata, compression=compression)
        except grpc.RpcError as exc:
            outcome = _of_error(exc)
        except ValueError as exc:  # grpcio itself refuses, for example metadata with a line break
            outcome = Outcome(REFUSED, f"by the client: {exc}")
    return Outcome(outcome.answer, outcome.reason, time.monotonic() - started)


def _of_error(exc: Any) -> Outcome:
    code, details = exc.code(), str(exc.details())
    reason = f"{code.name} {details[:160]}"
    if code.name in _REFUSED:
        return Outcome(REFUSED, reason)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        from_gateway = "did not answer in time" in details
        return Outcome(FAILED if from_gateway else HANG, reason)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        gone = code is grpc.StatusCode.CANCELLED or any(text in details.lower() for text in _GONE)
        return Outcome(CLOSED if gone else REFUSED, reason)
    return Outcome(FAILED, reason)
