"""Hostile gRPC messages.  Each line gives a method, the bytes of a message, and options of the call."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2

from tests.hostile.case import cases
from tests.hostile.graphs import varint
from tests.hostile.http_requests import GRPC_PORT, Held, region_key
from tests.hostile.images import bomb, photo

SERVICE = "/inference.GRPCInferenceService"
PIXELS = 8 * 8 * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Calls of a method, in sequence.

    method: the path.  messages: the bytes of the messages; with ``stream``, the messages of a single call.
    metadata: headers of the calls.  compressed: True to send gzip.
    """

    method: str
    messages: Sequence[bytes]
    stream: bool = False
    metadata: Sequence[tuple[str, str | bytes]] = ()
    compressed: bool = False
    then: Sequence[Any] = field(default_factory=tuple)


def _call(method: str, *messages: Any, **options: Any) -> Call:
    sent = [message if isinstance(message, bytes) else message.SerializeToString() for message in messages]
    return Call(method=method if method.startswith("/") else f"{SERVICE}/{method}", messages=sent, **options)


def _request(model: str = "gmmvit_network", name: str = "pixels", kind: str = "UINT8", **options: Any) -> Any:
    """An inference of zeros, with changes.  shape, raw: the shape and the bytes of the input."""
    request = service_pb2.ModelInferRequest(model_name=model, id=options.get("id", ""))
    request.inputs.add(name=name, datatype=kind, shape=options.get("shape", [1, 8, 8, 3]))
    if (raw := options.get("raw", bytes(PIXELS))) is not None:
        request.raw_input_contents.append(raw)
    return request


def _infer(**options: Any) -> Call:
    return _call("ModelInfer", _request(**options))


def _images(*images: bytes, model: str = "gmmvit", tensor: bytes | None = None, count: int | None = None) -> Any:
    raw = b"".join(struct.pack("<I", len(image)) + image for image in images) if tensor is None else tensor
    shape = [len(images) if count is None else count, 1]
    return _request(model, "IMAGE", "BYTES", shape=shape, raw=raw)


def images_request(images: Sequence[bytes], model: str) -> Call:
    """Return a request of an ensemble with these images."""
    return _call("ModelInfer", _images(*images, model=model))


def sound_request() -> Call:
    """Return a request that must be answered."""
    return _infer()


def _changed(change: Callable[[Any], Any]) -> Call:
    request = _request()
    change(request)
    return _call("ModelInfer", request)


def _parameter(name: str, value: int) -> Callable[[Any], None]:
    return lambda request: setattr(request.parameters[name], "int64_param", value)


def _wide_contents(request: Any) -> None:
    del request.raw_input_contents[:]
    request.inputs[0].contents.uint_contents.extend([300] * PIXELS)


def _float_contents(request: Any) -> None:
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend([float("nan")] * PIXELS)


def _twice(request: Any) -> None:
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(bytes(PIXELS))


def _many(request: Any) -> None:
    for number in range(10_000):
        request.inputs.add(name=f"n{number}", datatype="UINT8", shape=[1])
        request.raw_input_contents.append(b"a")


def _output(name: str, **parameters: int) -> Callable[[Any], None]:
    def change(request: Any) -> None:
        output = request.outputs.add(name=name)
        for key, value in parameters.items():
            output.parameters[key].int64_param = value

    return change


def _region(key: str) -> Call:
    """Register a region of shared memory, and use it as an input, and then for the output."""
    register = service_pb2.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=PIXELS)
    request = _request(raw=None)
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = PIXELS
    into = service_pb2.ModelInferRequest.FromString(request.SerializeToString())
    _output("logits", shared_memory_byte_size=PIXELS)(into)
    into.outputs[0].parameters["shared_memory_region"].string_param = "r"
    infer = _call("ModelInfer", request, into, into)
    unregister = _call("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name="r"))
    return _call("SystemSharedMemoryRegister", register, then=(infer, unregister))


def _log(**settings: Any) -> Call:
    request = service_pb2.LogSettingsRequest()
    for name, value in settings.items():
        setattr(request.settings[name], "bool_param" if isinstance(value, bool) else "string_param", value)
    return _call("LogSettings", request)


def _trace() -> Call:
    request = service_pb2.TraceSettingRequest()
    request.settings["trace_file"].value.append("canary")
    request.settings["trace_level"].value.append("TIMESTAMPS")
    return _call("TraceSetting", request)


def _load() -> Call:
    request = service_pb2.RepositoryModelLoadRequest(model_name="evil")
    request.parameters["config"].string_param = '{"backend":"python"}'
    request.parameters["file:1/model.py"].bytes_param = b"open('canary','w')"
    return _call("RepositoryModelLoad", request)


def _wide() -> Any:
    """300 for UINT8, without the name of the model."""
    request = _request("")
    _wide_contents(request)
    return request


def _behind(fields: bytes, request: Any = None) -> bytes:
    """Return the name of the model, then these fields, then the request, by default 300 for UINT8."""
    name = service_pb2.ModelInferRequest(model_name="gmmvit_network").SerializeToString()
    return name + fields + (request or _wide()).SerializeToString()


def _groups(levels: int) -> bytes:
    """Groups of an unknown field, nested."""
    return b"\xa3\x06" * levels + b"\xa4\x06" * levels


def _lengths(levels: int) -> bytes:
    """An unknown field in an unknown field; a reader of the known fields skips it."""
    body = b""
    for _ in range(levels):
        body = b"\xa2\x06" + varint(len(body)) + body
    return body


def _frame(kind: int, flags: int = 0, stream: int = 0, content: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def _frames(frames: bytes, connections: int = 1) -> Held:
    """Connections that send frames of HTTP/2 after a sound begin, and then nothing."""
    return Held(GRPC_PORT, PREFACE + _frame(SETTINGS) + frames, connections)


DATA, HEADERS, RESET, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
POST = b"\x83\x86\x84\x41\x01a"
"""The header block of a request: POST, http, /, and the authority a."""
PHOTO = photo()
CALLS: dict[str, Callable[[], Call | Held]] = {
    "message of 600 MB": lambda: _call("ModelInfer", _request(raw=bytes(600_000_000))),
    "message of 64 MB of an unknown field": lambda: _call("ModelInfer", b"\xa2\x06" + varint(2**26) + bytes(2**26)),
    "message of 64 MB in 64 kB of gzip": lambda: _call("ModelInfer", _request(raw=bytes(64_000_000)), compressed=True),
    "random bytes": lambda: _call("ModelInfer", bytes(range(256)) * 10),
    "empty message": lambda: _call("ModelInfer", b""),
    "groups in groups": lambda: _call("ModelInfer", _groups(100_000)),
    "fields in fields": lambda: _call("ModelInfer", _lengths(20_000)),
    "length of 2**63": lambda: _call("ModelInfer", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"),
    "number of 20 bytes": lambda: _call("ModelInfer", b"\x20" + b"\xff" * 20),
    "input without a data type": lambda: _infer(kind="", raw=None),
    "tag 0": lambda: _call("ModelInfer", b"\0\0\0"),
    "model name that is no UTF-8": lambda: _call("ModelInfer", b"\x0a\x02\xff\xfe"),
    "model name of 1 MB": lambda: _infer(model="a" * 1_000_000),
    "model name that is a path": lambda: _infer(model="../../../etc/passwd"),
    "model name with a line break and a log line": lambda: _infer(model="a\nE1123 00:00:00 server is down"),
    "model name in Unicode": lambda: _infer(model="💣"),
    "request id of 1 MB": lambda: _call("ModelInfer", _request("no_model", id="i" * 1_000_000)),
    "version that is a text": lambda: _changed(lambda request: setattr(request, "model_version", "latest")),
    "shape below 0": lambda: _infer(shape=[-1, 8, 8, 3]),
    "shape whose product overflows": lambda: _infer(shape=[2**62, 2**62, 8, 3]),
    "shape of 100,000 dimensions": lambda: _infer(shape=[1] * 100_000),
    "shape without dimensions": lambda: _infer(shape=[]),
    "batch of 0": lambda: _infer(shape=[0, 8, 8, 3], raw=b""),
    "batch of 65": lambda: _infer(shape=[65, 8, 8, 3], raw=bytes(65 * PIXELS)),
    "too few bytes": lambda: _infer(raw=b"a"),
    "no bytes": lambda: _infer(raw=None),
    "unknown data type": lambda: _infer(kind="UINT7"),
    "data type of texts": lambda: _infer(kind="BYTES"),
    "unknown input": lambda: _infer(name="secret"),
    "input of another model": lambda: _infer(model="gmmvit"),
    "bytes and numbers": lambda: _changed(
        lambda request: request.inputs[0].contents.uint_contents.extend([0] * PIXELS)
    ),
    "numbers of another type": lambda: _changed(_float_contents),
    "the same input twice": lambda: _changed(_twice),
    "10,000 inputs": lambda: _changed(_many),
    "an unknown output": lambda: _changed(_output("secret")),
    "classes below 0": lambda: _changed(_output("logits", classification=-1)),
    "output into shared memory that nobody registered": lambda: _changed(
        _output("logits", shared_memory_byte_size=2**40)
    ),
    "image of 4 GB by its length prefix": lambda: _call("ModelInfer", _images(tensor=b"\xff" * 8, count=1)),
    "fewer images than the shape": lambda: _call("ModelInfer", _images(PHOTO, count=8)),
    "images of zero bytes": lambda: _call("ModelInfer", _images(b"", b"")),
    "8 images of 49 million pixels": lambda: _call("ModelInfer", _images(*[bomb()] * 8)),
    "region of the Python backend as shared memory": lambda: _region(region_key()),
    "region with a path": lambda: _region("/../../etc/passwd"),
    "CUDA region": lambda: _call(
        "CudaSharedMemoryRegister",
        service_pb2.CudaSharedMemoryRegisterRequest(name="c", raw_handle=bytes(64), byte_size=64),
    ),
    "list shared memory": lambda: _call("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
    "switch off the log": lambda: _log(log_error=False, log_info=False),
    "write the log to a file": lambda: _log(log_file="canary"),
    "trace to a file": _trace,
    "list the models": lambda: _call("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
    "load a model": _load,
    "unload the network": lambda: _call(
        "RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="gmmvit_network")
    ),
    "unknown method": lambda: _call("Shutdown", b""),
    "unknown service": lambda: _call("/admin.Admin/Stop", b""),
    "path without a service": lambda: _call("/", b""),
    "path that leaves the service": lambda: _call(f"{SERVICE}/../ModelInfer", _request()),
    "reflection": lambda: _call(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"\x3a\0", stream=True
    ),
    "metadata of 1 MB": lambda: _call("ModelInfer", _request("no_model"), metadata=[("x", "a" * 1_000_000)]),
    "1,000 metadata": lambda: _call("ModelInfer", _request("no_model"), metadata=[(f"x{n}", "a") for n in range(1000)]),
    "metadata of the administrator, guessed": lambda: _call(
        "RepositoryIndex",
        service_pb2.RepositoryIndexRequest(),
        metadata=[("triton-grpc-protocol-x-admin", "secret"), ("x-admin", "secret")],
    ),
    "compression that nobody knows": lambda: _call(
        "ModelInfer", _request("no_model"), metadata=[("grpc-encoding", "zstd")]
    ),
}
VALID: dict[str, Callable[[], Call | Held]] = {
    "500 idle connections": lambda: Held(GRPC_PORT, b"", 500),
    "500 connections that send only the begin of HTTP/2": lambda: Held(GRPC_PORT, PREFACE[:20], 500),
    "HTTP/1.1 on the port for gRPC": lambda: Held(GRPC_PORT, b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", 1),
    "bytes that are no HTTP": lambda: Held(GRPC_PORT, bytes(range(256)) * 40, 1),
    "50,000 streams that are reset at once": lambda: _frames(
        b"".join(
            _frame(HEADERS, 4, stream, POST) + _frame(RESET, 0, stream, bytes(4)) for stream in range(1, 100_000, 2)
        )
    ),
    "100,000 settings": lambda: _frames(_frame(SETTINGS) * 100_000),
    "100,000 pings": lambda: _frames(_frame(PING, 0, 0, bytes(8)) * 100_000),
    "headers that do not end": lambda: _frames(
        _frame(HEADERS, 0, 1, POST) + _frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b" * 100) * 2000
    ),
    "100 streams without a message": lambda: _frames(
        b"".join(_frame(HEADERS, 4, stream, POST) for stream in range(1, 200, 2)), 20
    ),
    "100 streams whose messages stop, on 100 connections": lambda: _frames(
        b"".join(_frame(HEADERS, 4, stream, POST) + _frame(DATA, 0, stream, b"A" * 300) for stream in range(1, 200, 2)),
        100,
    ),
    "data for a stream that was never opened": lambda: _frames(_frame(DATA, 0, 7, b"a")),
    "frame of 16 MB": lambda: _frames(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1000)),
    "group in front of 300 for UINT8": lambda: _call("ModelInfer", _behind(_groups(1))),
    "60,000 numbers of an unknown field in front of 300 for UINT8": lambda: _call(
        "ModelInfer", _behind(b"\xa0\x06\x01" * 60_000)
    ),
    "group in front of 2**32 + 1 images": lambda: _call(
        "ModelInfer", _behind(_groups(1), _request("", shape=[2**32 + 1, 8, 8, 3]))
    ),
    "bytes in front of the inputs": lambda: _call(
        "ModelInfer", _behind(b"\x3a\xc0\x01" + bytes(PIXELS), _request("", shape=[2**32 + 1, 8, 8, 3], raw=None))
    ),
    "input whose number has a longer form": lambda: _call(
        "ModelInfer", b"\x0a\x0egmmvit_network\xaa\0" + _wide().SerializeToString()[1:]
    ),
    "300 for UINT8": lambda: _changed(_wide_contents),
    "more bytes than inputs": lambda: _changed(lambda request: request.raw_input_contents.append(bytes(PIXELS))),
    "2**31 classes": lambda: _changed(_output("logits", classification=2**31)),
    "priority of 2**62": lambda: _changed(_parameter("priority", 2**62)),
    "timeout below 0": lambda: _changed(_parameter("timeout", -1)),
    "sequence that was never begun": lambda: _changed(_parameter("sequence_id", 7)),
    "2**32 + 1 images in the shape, which is 1 in 32 bits": lambda: _call(
        "ModelInfer", _images(PHOTO, count=2**32 + 1)
    ),
    "statistics": lambda: _call("ModelStatistics", service_pb2.ModelStatisticsRequest()),
    "a stream of 1,000 bad messages": lambda: _call("ModelStreamInfer", *[_request(raw=b"a")] * 1000, stream=True),
    "a stream of random bytes": lambda: _call("ModelStreamInfer", b"\xff" * 1000, stream=True),
    "a stream without messages": lambda: _call("ModelStreamInfer", stream=True),
}
"""Calls that may be answered: others must be answered while connections send no complete request. Triton ignores bytes
behind those of the inputs, keeps a batch in 32 bits, and reduces a number to the type of the input: a client with a key
misleads itself alone. Such a client may read the statistics. A model without queue policy or sequences
ignores their parameters, an answer has at most the classes of the model, and a stream can end without an error of the
call."""

GRPC = (*cases("grpc", CALLS), *cases("grpc", VALID, may_be_answered=True))
"""The hostile gRPC calls; ``make()`` returns a `Call`, or `Held`."""
