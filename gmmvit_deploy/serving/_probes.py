"""Ask a model of a running server for a real inference.

A Triton server whose worker has died still reports that it is ready, so only an inference shows that a model answers.
A probe has a batch of one with zeros, or a PNG image for an input of bytes.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.inference import PROBE_ID
from gmmvit_deploy.serving._local_http import text_from_url

_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2, "UINT32": 4, "INT32": 4}
_BYTES |= {"FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8}
_CONFIG_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A request for an inference of a model.  json_bytes: the length of the JSON at the beginning of ``body``."""

    model: str
    body: bytes
    json_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a probe.

    result: ``answered``; ``refused``, with an error status; ``late``, without an answer in time; ``unreachable``.
    detail: the error; empty for ``answered``.  seconds: the time that the probe took.
    """

    result: Literal["answered", "refused", "late", "unreachable"]
    detail: str = ""
    seconds: float = 0.0


def probe_of_model(http_url: str, model: str) -> Probe | None:
    """Make the probe of a model from the configuration that the server reports.

    None for an ensemble, which does not compute itself, and for a model with an input without a known example.
    Errors: ServerError when the server reports no configuration.
    """
    try:
        config = json.loads(text_from_url(f"{http_url}/v2/models/{model}/config", timeout_s=_CONFIG_S))
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise ServerError(f"{model}: the server reports no configuration: {exc}") from exc
    return None if "ensemble_scheduling" in config else _probe(model, config)


def _probe(model: str, config: Mapping[str, Any]) -> Probe | None:
    inputs, tensors = [], []
    for entry in config.get("input", []):
        kind = str(entry["data_type"]).removeprefix("TYPE_").replace("STRING", "BYTES")
        shape = [max(1, int(size)) for size in entry["dims"]]  # -1 stands for any size
        elements = math.prod(shape)
        if kind == "BYTES":
            data = _image() * elements
        elif kind in _BYTES:
            data = bytes(_BYTES[kind] * elements)
        else:
            return None
        batch = [1] if int(config.get("max_batch_size", 0)) else []
        parameters = {"binary_data_size": len(data)}
        inputs.append({"name": entry["name"], "shape": batch + shape, "datatype": kind, "parameters": parameters})
        tensors.append(data)
    outputs = [{"name": entry["name"], "parameters": {"binary_data": True}} for entry in config.get("output", [])]
    header = json.dumps({"id": PROBE_ID, "inputs": inputs, "outputs": outputs}).encode()
    return Probe(model=model, body=header + b"".join(tensors), json_bytes=len(header))


def _image() -> bytes:
    """Return a grey PNG as an element of a BYTES tensor: its length, then its bytes.

    It has more pixels than the preprocessing model decodes itself, so a probe also shows that large images work.
    """
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (1025, 1024), (128, 128, 128)).save(file, "PNG")
    return struct.pack("<I", file.tell()) + file.getvalue()


def ask(host: str, port: int, probe: Probe, timeout_s: float) -> Answer:
    """Send a probe over a new connection, and wait up to ``timeout_s`` seconds for the answer."""
    started = time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        headers = {"Inference-Header-Content-Length": str(probe.json_bytes)}
        connection.request("POST", f"/v2/models/{probe.model}/infer", probe.body, headers)
        response = connection.getresponse()
        content = response.read()
    except TimeoutError:
        return Answer(result="late", detail=f"no answer within {timeout_s:.1f} s", seconds=timeout_s)
    except (OSError, http.client.HTTPException) as exc:
        return Answer(result="unreachable", detail=str(exc) or type(exc).__name__, seconds=time.monotonic() - started)
    finally:
        connection.close()
    seconds = time.monotonic() - started
    if response.status == 200:
        return Answer(result="answered", seconds=seconds)
    text = content.decode(errors="replace")[:200]
    return Answer(result="refused", detail=f"status {response.status}: {text}", seconds=seconds)
