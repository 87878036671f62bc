"""Model for Triton's Python backend: convert encoded images to the network's input.

``gmmvit repository`` copies this file to ``<preprocess>/1/model.py``, and `gmmvit_deploy.inference` to
``gmmvit_inference`` in the same folder. The server therefore decodes images with the same code that ``gmmvit parity``
checks. The model needs numpy and Pillow in the server's Python.

An image may be sent as base64 text, because JSON, as in requests of Triton's generate extension, holds no bytes.

The pixels of the images of a request are counted from their headers, before an image is decoded. A request with more
pixels than the parameter ``request_pixels`` is refused. Triton calls `execute` again only after the call returns, so
`execute` decodes at most `SMALL_PIXELS` in a call. The images of a larger request are decoded by `LargeImages`, which
also answers the request. A request is refused with the status UNAVAILABLE while more than ``worker_pixels`` pixels
would wait there, and if it would wait there with the images of several clients (`GROUPED`).
"""

import json
import math
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parent))
from gmmvit_inference import GROUPED
from gmmvit_inference.cores import cores
from gmmvit_inference.large_images import Decoder, Job, LargeImages
from gmmvit_inference.preprocess import (
    SMALL_PIXELS,
    UnusableImage,
    bytes_from_base64,
    open_image,
    pixels_from_opened,
    pixels_to_compute,
    tensor_from_pixels,
)

INPUT = "IMAGE"
TARGET = ("height", "width", "channels", "resize", "crop_pct", "mean")  # arguments of pixels_from_opened
COUNTED = ("height", "width", "resize", "crop_pct")  # arguments of pixels_to_compute
THREADED_PIXELS = 2**16
"""With fewer pixels, a call of `execute` decodes its images in a single thread: for small images, handing an image to
another thread takes as long as decoding the image."""

BASE64_STARTS = (b"/9j/", b"_9j_", b"iVBORw0KGg", b"UklGR", b"Qk", b"data:", b"DATA:")
"""The first characters of a JPEG, PNG, WebP and BMP file in base64, and of a data URL. No image begins with them."""

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - Triton passes the answers on in it
SHARE = 0.25
"""The share of the shared memory that the answers to large images may fill: the network reads copies of them there."""


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.output = config["output"][0]["name"]
        self.max_batch = config["max_batch_size"]
        settings = json.loads(parameters["preprocessing"])
        self.target = {name: settings[name] for name in TARGET}
        self.counted = {name: settings[name] for name in COUNTED}
        self.mean, self.std = settings["mean"], settings["std"]
        # Pillow releases the interpreter lock while it decodes, so several threads decode the images of a batch.
        threads = settings["threads"] or cores()
        self.pool = ThreadPoolExecutor(max_workers=threads)
        self.request_pixels = int(parameters["request_pixels"])
        max_pixels = int(parameters["worker_pixels"])
        self.large = LargeImages(threads=threads, max_pixels=max_pixels, target=self.target)
        image_bytes = math.prod(self.target[name] for name in ("height", "width", "channels"))
        image_bytes *= 4 if self.output == "tensor" else 1
        self.shared_bytes = shutil.disk_usage(SHARED_MEMORY).total
        self.images_left = max(1, int(SHARE * self.shared_bytes) // image_bytes)
        self.changing = threading.Lock()  # held while images_left changes
        if self.images_left < self.max_batch:
            pb_utils.Logger.log_warn(
                f"{SHARED_MEMORY} has {self.shared_bytes >> 20} MiB: at most {self.images_left} large images are "
                "prepared at a time; start the server with more, such as docker run --shm-size=1g"
            )

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Return an answer for each request, or None for a request that `LargeImages` will answer."""
        left = SMALL_PIXELS
        answers: list[Any] = [None] * len(requests)
        small: list[tuple[int, list[Any]]] = []  # (position of the request, opened images)
        for position, request in enumerate(requests):
            encoded, opened, refused = self._checked(request)
            if refused is not None:
                answers[position] = refused
                continue
            pixels = sum(count for _, count in opened)
            if pixels <= left:
                left -= pixels
                small.append((position, [image for image, _ in opened]))
            elif json.loads(request.parameters() or "{}").get(GROUPED):
                answers[position] = _refused("large images are taken one by one; send each image alone", later=True)
            else:
                answers[position] = self._later(request, encoded, opened, pixels)
        # The images of all requests are decoded together: the batcher combines requests with a single image.
        decoded = iter(self._all_decoded([image for _, images in small for image in images], SMALL_PIXELS - left))
        for position, images in small:
            answers[position] = self._answered([next(decoded) for _ in images])
        return answers if any(answer is not None for answer in answers) else None

    def finalize(self) -> None:
        self.pool.shutdown()
        self.large.close()

    def _checked(self, request: Any) -> tuple[Any, list[Any], Any]:
        """Return (encoded images, (opened image, number of pixels) of each image, refusal or None)."""
        encoded = pb_utils.get_input_tensor_by_name(request, INPUT).as_numpy().reshape(-1)
        if not 1 <= len(encoded) <= self.max_batch:
            return encoded, [], _refused(f"expected a batch of 1 to {self.max_batch} images, got {len(encoded)}")
        encoded = [_file_of(bytes(data)) for data in encoded]
        opened = [self._opened(data) for data in encoded]
        if problems := _problems(opened):
            return encoded, [], _refused(problems)
        pixels = sum(count for _, count in opened)
        if pixels > self.request_pixels:
            reason = (
                f"the images of the request have {pixels} pixels; the maximum is {self.request_pixels} pixels in a "
                "request"
            )
            return encoded, [], _refused(reason)
        return encoded, opened, None

    def _all_decoded(self, images: list[Any], pixels: int) -> list[Any]:
        """Return `_decoded` of each opened image.  pixels: the number of pixels of all images."""
        if len(images) == 1 or pixels < THREADED_PIXELS:
            return [self._decoded(image) for image in images]
        return list(self.pool.map(self._decoded, images))

    def _later(self, request: Any, encoded: Any, opened: list[Any], pixels: int) -> Any:
        """Hand the images of a request to `LargeImages`; return an answer only if the request is refused."""
        if not self.large.has_room(pixels):
            return _refused(
                f"more than {self.large.max_pixels} pixels of large images would wait for preprocessing; send the "
                "request again later",
                later=True,
            )
        with self.changing:
            if len(opened) > self.images_left:
                return _refused(
                    f"the answers to large images would fill {SHARED_MEMORY}, which has {self.shared_bytes >> 20} MiB; "
                    "send fewer images in a request, or start the server with more, such as docker run --shm-size=1g",
                    later=True,
                )
            self.images_left -= len(opened)
        decoded: list[Any] = [None] * len(opened)
        sender = request.get_response_sender()
        waiting: list[Any] = list(encoded)

        def decode(start: int, stop: int, decoder: Decoder) -> None:
            for number in range(start, stop):
                decoded[number] = self._array(decoder.pixels(waiting[number]))
                waiting[number] = None

        parts = _parts([count for _, count in opened])
        steps: list[Callable[[Decoder], None]] = [partial(decode, *part) for part in parts]
        self.large.add(Job(steps, pixels=pixels, finish=partial(self._send, sender, decoded)))
        return None

    def _send(self, sender: Any, decoded: list[Any]) -> None:
        try:
            answer = self._answered(decoded)
        except Exception as exc:  # the thread must live, and the client must get an answer
            answer = pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{type(exc).__name__}: {exc}"))
        try:
            sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception:
            # Triton takes no second answer for a request, so its client would wait for ever. When this process ends,
            # the server is started again.
            traceback.print_exc()
            os._exit(1)
        with self.changing:
            self.images_left += len(decoded)

    def _answered(self, decoded: list[Any]) -> Any:
        if problems := _problems(decoded):
            return _refused(problems)
        batch = np.stack(decoded)
        if self.output == "tensor":
            batch = tensor_from_pixels(batch, self.mean, self.std)
        return pb_utils.InferenceResponse([pb_utils.Tensor(self.output, batch)])

    def _opened(self, data: bytes | None) -> Any:
        """Return (opened image, number of pixels), or the reason why the image cannot be used.  data: of `_file_of`."""
        if data is None:
            return "the image begins as base64 text, but is not valid base64"
        try:
            image = open_image(data)
            return image, pixels_to_compute(image, **self.counted)
        except UnusableImage as exc:
            return str(exc)

    def _array(self, content: Any) -> Any:
        """Return the pixels of a `Decoder` as an array; return a reason unchanged."""
        if isinstance(content, str):
            return content
        shape = (self.target["height"], self.target["width"], self.target["channels"])
        return np.frombuffer(content, np.uint8).reshape(shape)

    def _decoded(self, image: Any) -> Any:
        """Return the pixels of an opened image, or the reason why the image cannot be used."""
        try:
            with image:
                return pixels_from_opened(image, **self.target)
        except UnusableImage as exc:
            return str(exc)


def _file_of(data: bytes) -> bytes | None:
    """Return the bytes of an image file that was sent as it is or as base64 text; None for invalid base64 text."""
    return bytes_from_base64(data) if data[:64].lstrip().startswith(BASE64_STARTS) else data


def _problems(images: list[Any]) -> str:
    """Return the reasons why images cannot be used, of at most five images; empty if all images can be used."""
    problems = [f"image {i}: {reason}" for i, reason in enumerate(images) if isinstance(reason, str)]
    return "; ".join(problems[:5])


def _parts(pixels: list[int]) -> list[tuple[int, int]]:
    """Divide images into parts of at most `SMALL_PIXELS` pixels, or of a single image; return (start, stop) of each."""
    parts = [(0, 1)]
    for number in range(1, len(pixels)):
        start = parts[-1][0]
        if sum(pixels[start : number + 1]) <= SMALL_PIXELS:
            parts[-1] = (start, number + 1)
        else:
            parts.append((number, number + 1))
    return parts


def _refused(message: str, *, later: bool = False) -> Any:
    """Return the refusal of a request.  later: True if the client may send the request again later."""
    codes = pb_utils.TritonError  # there only after the module was imported
    code = codes.UNAVAILABLE if later else codes.INVALID_ARG
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
