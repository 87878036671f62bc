"""Hostile HTTP requests.  Each line gives requests as bytes; each request is sent on a connection of its own.

A sender replaces `AUTH` by the headers of a client, with or without a key.
"""

from __future__ import annotations

import gzip
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.hostile.case import cases
from tests.hostile.images import bomb, photo

AUTH = b"@AUTH@"
"""The place of the headers with the key."""
CLASSIFY = "/classify"
LIVE = "/v2/health/live"
GRPC_PORT = "grpc"
"""In place of a path: the bytes go to the port for gRPC."""
OWN_REGIONS: list[str] = []
"""Names in /dev/shm of the service's own server; the service states them when it has started."""
NETWORK, ENSEMBLE = "/v2/models/gmmvit_network/infer", "/v2/models/gmmvit/infer"
PIXELS = 8 * 8 * 3


@dataclass(frozen=True, slots=True)
class Request:
    """A request: the pieces to send, and the path, which decides the port."""

    path: str
    pieces: Iterable[bytes]


@dataclass(frozen=True, slots=True)
class Held:
    """Connections that send the same begin, and then nothing.

    The answer to a sound request on another connection is the outcome.
    """

    path: str
    begin: bytes
    connections: int


def _head(path: str, *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", *headers]
    return "\r\n".join(lines).encode() + b"\r\n" + AUTH + b"\r\n"


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> list[Request]:
    stated = len(body) if length is None else length
    return [Request(path, [_head(path, f"Content-Length: {stated}", *headers) + body])]


def _raw(data: bytes, path: str = NETWORK) -> list[Request]:
    return [Request(path, [data])]


def _get(path: str, *headers: str, method: str = "GET") -> list[Request]:
    return [Request(path, [_head(path, *headers, method=method)])]


def _chunked(path: str, chunks: Iterator[bytes], *headers: str) -> list[Request]:
    def pieces() -> Iterator[bytes]:
        yield _head(path, "Transfer-Encoding: chunked", *headers)
        yield from chunks

    return [Request(path, pieces())]


def _one_byte_chunks(count: int) -> Iterator[bytes]:
    for _ in range(count // 10_000):
        yield b"1\r\na\r\n" * 10_000
    yield b"0\r\n\r\n"


def _infer(path: str = NETWORK, **changes: Any) -> list[Request]:
    """An inference as JSON with a changed input."""
    tensor = {"name": "pixels", "shape": [1, 8, 8, 3], "datatype": "UINT8", "data": [0] * PIXELS, **changes}
    return post(path, json.dumps({"inputs": [tensor]}).encode(), "Content-Type: application/json")


def _document(document: Any, path: str = NETWORK) -> list[Request]:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return post(path, body, "Content-Type: application/json")


def _binary(
    tensor: bytes, *, count: int = 1, size: int | None = None, header_length: int | str | None = None
) -> list[Request]:
    """Images behind JSON.  count: of the images, size: of the tensor, header_length: of the JSON, as it is stated."""
    parameters = {"binary_data_size": len(tensor) if size is None else size}
    image = {"name": "IMAGE", "shape": [count, 1], "datatype": "BYTES", "parameters": parameters}
    text = json.dumps({"inputs": [image]}).encode()
    length = len(text) if header_length is None else header_length
    return post(ENSEMBLE, text + tensor, f"Inference-Header-Content-Length: {length}")


def _signed(text: bytes) -> list[Request]:
    """JSON whose stated length has a sign, which Triton reads and other programs do not."""
    return post(NETWORK, text, f"Inference-Header-Content-Length: +{len(text)}")


def _header(text: bytes) -> list[Request]:
    """JSON in front of the binary tensor of a sound request."""
    return post(NETWORK, text + bytes(PIXELS), f"Inference-Header-Content-Length: {len(text)}")


def _endless(stated: int) -> list[Request]:
    """120 MB of a body of which the length is stated as more."""
    head = _head(NETWORK, f"Content-Length: {stated}", "Inference-Header-Content-Length: 0")
    return [Request(NETWORK, [head, *[bytes(1_000_000)] * 120])]


def region_key() -> str:
    """Return the key of the shared memory that Triton's Python backend uses, which an error of Triton can state."""
    return f"/{OWN_REGIONS[-1]}" if OWN_REGIONS else "/gmmvit-run-serve-"


def _region(key: str, *, offset: int = 0) -> list[Request]:
    """Register a region of shared memory, and use it as an input, and then for the output."""
    register = json.dumps({"key": key, "offset": offset, "byte_size": PIXELS}).encode()
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": PIXELS}
    tensor = {"name": "pixels", "shape": [1, 8, 8, 3], "datatype": "UINT8", "parameters": parameters}
    infer = {"inputs": [tensor], "outputs": [{"name": "logits", "parameters": parameters}]}
    return [
        *post("/v2/systemsharedmemory/region/r/register", register),
        *post(NETWORK, json.dumps({"inputs": [tensor]}).encode()),
        *post(NETWORK, json.dumps(infer).encode()),
        *post(NETWORK, json.dumps(infer).encode()),
        *post("/v2/systemsharedmemory/region/r/unregister", b""),
    ]


def _form(*parts: bytes, boundary: str = "b", end: bytes = b"--b--\r\n") -> list[Request]:
    body = b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end
    return post(CLASSIFY, body, f"Content-Type: multipart/form-data; boundary={boundary}")


def _file(name: str, content: bytes) -> bytes:
    return f'Content-Disposition: form-data; name="i"; filename="{name}"\r\n\r\n'.encode() + content


def _zip_encoding(data: bytes, encoding: str) -> list[Request]:
    return post(NETWORK, data, f"Content-Encoding: {encoding}")


NESTED = b"[" * 250_000
PHOTO = photo()
ONE_IMAGE = struct.pack("<I", len(PHOTO)) + PHOTO
ZEROS = {"name": "pixels", "shape": [1, 8, 8, 3], "datatype": "UINT8", "data": [0] * PIXELS}

REQUESTS: dict[str, Callable[[], list[Request] | Held]] = {
    # What stopped or blocked Triton 2.51 without protection
    "nested lists as gzip, 277 bytes": lambda: _zip_encoding(gzip.compress(NESTED, 9), "gzip"),
    "nested lists as deflate": lambda: _zip_encoding(zlib.compress(NESTED, 9), "deflate"),
    "nested lists, 250,000 levels": lambda: _document(NESTED),
    "nested objects": lambda: _document(b'{"a":' * 250_000),
    "nested lists to the logging interface": lambda: _document(NESTED, "/v2/logging"),
    "nested lists to the shared memory interface": lambda: _document(
        NESTED, "/v2/systemsharedmemory/region/x/register"
    ),
    "nested lists inside the data of a tensor": lambda: _document(
        b'{"inputs":[{"name":"pixels","shape":[1,8,8,3],"datatype":"UINT8","data":' + NESTED + b"}]}"
    ),
    "nested lists as the header of binary tensors": lambda: post(
        NETWORK, NESTED, f"Inference-Header-Content-Length: {len(NESTED)}"
    ),
    "2 million chunks of 1 byte": lambda: _chunked(NETWORK, _one_byte_chunks(2_000_000)),
    "200 MB of spaces as gzip": lambda: _zip_encoding(gzip.compress(b" " * 200_000_000, 1), "gzip"),
    "text of 300 MB in JSON": lambda: _document(b'{"id":"' + b"a" * 300_000_000 + b'"}'),
    "5 MB of letters": lambda: _document(b"a" * 5_000_000),
    "a body of zeros": lambda: _document(bytes(5_000_000)),
    "a body of random bytes": lambda: _document(random.Random(0).randbytes(5_000_000)),  # noqa: S311 - no secret
    "a header of 10 MB": lambda: _get(LIVE, f"X: {'a' * 10_000_000}"),
    "a path of 1 MB": lambda: _get("/" + "a" * 1_000_000),
    "300 for UINT8": lambda: _infer(data=[300] * PIXELS),
    "-1 for UINT8": lambda: _infer(data=[-1] * PIXELS),
    "NaN for UINT8": lambda: _document(json.dumps({"inputs": [{**ZEROS, "data": [float("nan")] * PIXELS}]}).encode()),
    "1.5 for UINT8": lambda: _infer(data=[1.5] * PIXELS),
    "texts for UINT8": lambda: _infer(data=["a"] * PIXELS),
    "shape below 0": lambda: _infer(shape=[-1, 8, 8, 3]),
    "shape whose product overflows": lambda: _infer(shape=[2**32, 2**32, 8, 3]),
    "shape of 2**63": lambda: _infer(shape=[2**63, 8, 8, 3]),
    "shape that is a text": lambda: _infer(shape="1,8,8,3"),
    "batch of 0": lambda: _infer(shape=[0, 8, 8, 3], data=[]),
    "too few numbers": lambda: _infer(data=[0]),
    "unknown data type": lambda: _infer(datatype="UINT7"),
    "data type of texts": lambda: _infer(datatype="BYTES"),
    "unknown input": lambda: _infer(name="secret"),
    "the same input twice": lambda: _document({"inputs": [ZEROS, ZEROS]}),
    "no inputs": lambda: _document({"inputs": []}),
    "10,000 inputs": lambda: _document({"inputs": [{**ZEROS, "name": f"n{n}", "data": [0]} for n in range(10_000)]}),
    "an unknown output": lambda: _document({"inputs": [ZEROS], "outputs": [{"name": "secret"}]}),
    "unknown parameters of the request": lambda: _document(
        {"inputs": [ZEROS], "parameters": {"sequence_id": -1, "priority": 2**70, "timeout": -1}}
    ),
    "JSON of another form": lambda: _document([1, 2, 3]),
    "JSON with bytes that are no UTF-8": lambda: _document(b'{"inputs": "\xff\xfe"}'),
    "JSON that ends early": lambda: _document(b'{"inputs": [{"name": "pix'),
    "empty body": lambda: _document(b""),
    # Interfaces of an administrator
    "switch off the log": lambda: _document({"log_error": False, "log_info": False}, "/v2/logging"),
    "log every request": lambda: _document({"log_verbose_level": 9}, "/v2/logging"),
    "write the log to a file": lambda: _document({"log_file": "canary"}, "/v2/logging"),
    "trace to a file": lambda: _document({"trace_file": "canary", "trace_level": ["TIMESTAMPS"]}, "/v2/trace/setting"),
    "list the models": lambda: _document({}, "/v2/repository/index"),
    "load a model": lambda: _document(
        {"parameters": {"config": '{"backend":"python"}', "file:1/model.py": "aW1wb3J0IG9z"}},
        "/v2/repository/models/evil/load",
    ),
    "unload the network": lambda: _document({}, "/v2/repository/models/gmmvit_network/unload"),
    "region of the Python backend as shared memory": lambda: _region(region_key()),
    "region with a path": lambda: _region("/../../etc/passwd"),
    "region beyond its end": lambda: _region(region_key(), offset=2**62),
    "list shared memory": lambda: _get("/v2/systemsharedmemory/status"),
    "unregister all CUDA memory": lambda: post("/v2/cudasharedmemory/unregister", b""),
    "statistics": lambda: _get("/v2/models/stats"),
    # Paths and methods
    "model name in Unicode": lambda: _get("/v2/models/%F0%9F%92%A3/infer"),
    "model name of 5,000 letters": lambda: _get(f"/v2/models/{'a' * 5000}"),
    "path with ..": lambda: _get("/v2/models/../../../../etc/passwd"),
    "path with encoded ..": lambda: _get("/v2/models/..%2f..%2fetc%2fpasswd/config"),
    "path with a zero byte": lambda: _get("/v2/models/gmmvit%00/config"),
    "version of 2**63": lambda: _get(f"/v2/models/gmmvit/versions/{2**63}/ready"),
    "generate, which is for language models": lambda: _document({"IMAGE": "a"}, "/v2/models/gmmvit/generate"),
    "address of another server as the target": lambda: _get("http://169.254.169.254/latest/meta-data/"),
    "CONNECT": lambda: _get("localhost:22", method="CONNECT"),
    "TRACE": lambda: _get(LIVE, method="TRACE"),
    "a method of 100 kB": lambda: _get(LIVE, method="A" * 100_000),
    "PUT of a file": lambda: [Request(CLASSIFY, [_head("/canary", "Content-Length: 1", method="PUT") + b"a"])],
    # HTTP itself
    "two lengths": lambda: _raw(_head(NETWORK, "Content-Length: 5", "Content-Length: 50") + b"hello"),
    "length and chunks": lambda: _raw(
        _head(NETWORK, "Content-Length: 4", "Transfer-Encoding: chunked") + b"0\r\n\r\nGET /v2/logging HTTP/1.1\r\n\r\n"
    ),
    "length below 0": lambda: _raw(_head(NETWORK, "Content-Length: -5") + b"hello"),
    "length of 2**64": lambda: _raw(_head(NETWORK, f"Content-Length: {2**64}") + b"hello"),
    "length of 2**64, in Triton's raw form": lambda: _raw(
        _head(NETWORK, f"Content-Length: {2**64}", "Inference-Header-Content-Length: 0") + bytes(PIXELS)
    ),
    "length that is below 0 in 32 bits": lambda: _endless(3 * 10**9),
    "length that is small in 32 bits": lambda: _endless(4294968296),
    "chunk of 2**64 bytes": lambda: _raw(_head(NETWORK, "Transfer-Encoding: chunked") + b"ffffffffffffffffff\r\na"),
    "chunk of a length that is a text": lambda: _raw(_head(NETWORK, "Transfer-Encoding: chunked") + b"zz\r\na\r\n"),
    "trailers of 1 MB behind the chunks": lambda: _raw(
        _head(NETWORK, "Transfer-Encoding: chunked") + b"1\r\na\r\n0\r\n" + b"X: a\r\n" * 150_000 + b"\r\n"
    ),
    "unknown transfer encoding": lambda: _raw(_head(NETWORK, "Transfer-Encoding: cow") + b"moo"),
    "unknown content encoding": lambda: _zip_encoding(b"moo", "br, gzip, zstd"),
    "damaged gzip": lambda: _zip_encoding(gzip.compress(b"{}")[:-6] + b"abcdef", "gzip"),
    "header name with a space": lambda: _raw(_head(LIVE, "X Y: a", method="GET"), LIVE),
    "header with a zero byte": lambda: _raw(_head(LIVE, "X: a\0b", method="GET"), LIVE),
    "version 9.9": lambda: _raw(_head(LIVE, method="GET", version="9.9"), LIVE),
    "HTTP/2 without an agreement": lambda: _raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64)),
    "the begin of TLS": lambda: _raw(b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(500)),
    "random bytes": lambda: _raw(bytes(range(256)) * 40),
    "line breaks": lambda: _raw(b"\r\n" * 500_000),
    "expectation that nobody knows": lambda: post(NETWORK, b"{}", "Expect: 200-ok"),
    # Binary tensors
    "header of binary tensors longer than the body": lambda: _binary(ONE_IMAGE, header_length=10**6),
    "header of binary tensors below 0": lambda: _binary(ONE_IMAGE, header_length=-5),
    "header length of binary tensors that is a text": lambda: _binary(b"", header_length="ten"),
    "header length of binary tensors with a sign, and nested lists": lambda: post(
        NETWORK, b"[" * 16_700_000, "Inference-Header-Content-Length: +16700000"
    ),
    "header length of binary tensors with a sign, and 300 for UINT8": lambda: _signed(
        json.dumps({"id": "a" * 4200, "inputs": [{**ZEROS, "data": [300] * PIXELS}]}).encode()
    ),
    "two header lengths of binary tensors": lambda: post(
        NETWORK, b"[" * 250_000, "Inference-Header-Content-Length: 0", "Inference-Header-Content-Length: 250000"
    ),
    "300 for UINT8 under a key with an escape": lambda: _header(
        b'{"inputs":[{"name":"pixels","shape":[1,2,2,3],"datatype":"UINT8","d\\u0061ta":[300,300,300]}]}'
    ),
    "300 for UINT8 in a second input": lambda: _header(
        json.dumps({"inputs": [{"name": "a", "shape": [1], "datatype": "UINT8"}, {**ZEROS, "data": [300]}]}).encode()
    ),
    "300 for UINT8 under a key that is there twice": lambda: _header(b'{"inputs":[],"inputs":[{"data":[[300]]}]}'),
    "unknown key with nested lists in the header of binary tensors": lambda: _header(b'{"x":' + b"[" * 4000),
    "binary tensor shorter than stated": lambda: _binary(ONE_IMAGE, size=10**9),
    "image of 4 GB by its length prefix": lambda: _binary(b"\xff" * 8),
    "more images than lengths": lambda: _binary(ONE_IMAGE, count=8),
    "32 images of 49 million pixels": lambda: _binary((struct.pack("<I", len(bomb())) + bomb()) * 32, count=32),
    # The front
    "JSON to /classify": lambda: _document({"image": "a"}, CLASSIFY),
    "gzip to /classify": lambda: post(CLASSIFY, gzip.compress(PHOTO), "Content-Encoding: gzip"),
    "chunks to /classify": lambda: _chunked(CLASSIFY, iter([b"4\r\nabcd\r\n", b"0\r\n\r\n"])),
    "200 MB to /classify": lambda: post(CLASSIFY, bytes(1000), length=200_000_000),
    "form without its end": lambda: _form(_file("a", PHOTO), end=b""),
    "form with another boundary": lambda: _form(_file("a", PHOTO), boundary="c"),
    "form with a boundary of 10 kB": lambda: _form(_file("a", PHOTO), boundary="b" * 10_000),
    "form with 10,000 parts": lambda: _form(*[_file("a", b"")] * 10_000),
    "form with a file name that is a path": lambda: _form(_file("../../canary", PHOTO[:50])),
    "form with a field": lambda: _form(b'Content-Disposition: form-data; name="top"\r\n\r\n3'),
    "form whose part has a header of 1 MB": lambda: _form(b"X: " + b"a" * 1_000_000 + b"\r\n\r\n"),
    "form in a form": lambda: _form(
        b"Content-Type: multipart/mixed; boundary=c\r\n" + _file("f", b"--c\r\n\r\na\r\n--c--")
    ),
    "top that is code": lambda: post(f"{CLASSIFY}?top=__import__('os')", PHOTO),
}
VALID: dict[str, Callable[[], list[Request] | Held]] = {
    "top of 2**63": lambda: post(f"{CLASSIFY}?top={2**63}", PHOTO),
    "500 idle connections": lambda: Held(NETWORK, b"", 500),
    "500 bodies that stop after 4 bytes": lambda: Held(NETWORK, _head(NETWORK, "Content-Length: 1000") + b'{"in', 500),
    "20 unfinished bodies of 20 MB": lambda: Held(
        NETWORK, _head(NETWORK, "Content-Length: 20000000") + bytes(19_000_000), 20
    ),
    "200 heads that do not end": lambda: Held(NETWORK, f"POST {NETWORK} HTTP/1.1\r\nHost: a\r\nX: ".encode(), 200),
    "200 heads of 100 kB that do not end": lambda: Held(
        NETWORK, b"GET /v2 HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 1100) for n in range(90)), 200
    ),
    "100 images of which the bodies stop, to /classify": lambda: Held(
        CLASSIFY, _head(CLASSIFY, "Content-Length: 100000") + PHOTO[:99], 100
    ),
    "1,000 headers": lambda: _get(LIVE, *(f"X-{n}: a" for n in range(1000))),
    "2**31 classes": lambda: _document(
        {"inputs": [ZEROS], "outputs": [{"name": "logits", "parameters": {"classification": 2**31}}]}
    ),
    "header with a line break inside": lambda: _raw(_head(LIVE, "X: a\r\n b", method="GET"), LIVE),
    "100 requests in a pipeline": lambda: _raw(_head(LIVE, method="GET") * 100, LIVE),
    "upgrade to WebSocket": lambda: _get(LIVE, "Upgrade: websocket", "Connection: Upgrade"),
    "key of 100 kB": lambda: _get(LIVE, f"Authorization: Bearer {'k' * 100_000}"),
    "headers of a proxy that name an address inside": lambda: _get(
        LIVE, "X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1", "X-Admin: secret"
    ),
    "secret of the front, guessed": lambda: post(CLASSIFY, PHOTO, "X-Gmmvit-Front: secret"),
    "2**32 + 1 images in the shape, which is 1 in 32 bits": lambda: _binary(ONE_IMAGE, count=2**32 + 1),
    "10,000 values in the query": lambda: post(f"{CLASSIFY}?{'&'.join(['top=1'] * 10_000)}", PHOTO),
}
"""Requests that a server may answer: they are unusual, or others must be answered meanwhile."""

HTTP = (*cases("http", REQUESTS), *cases("http", VALID, may_be_answered=True))
"""The hostile HTTP requests; ``make()`` returns the requests, or `Held`."""
