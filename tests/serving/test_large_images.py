"""Large images are decoded beside the requests with small images, within a budget of pixels.

The first tests run the threads alone; the others ask a real Triton server.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError, RequestRejectedError, ServerError
from gmmvit_deploy.inference import GROUPED
from gmmvit_deploy.inference.large_images import NICENESS, Decoder
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.inference.test_preprocess import encoded, photo, png
from tests.serving.commands import kinds_of
from tests.serving.conftest import flat_png
from tests.serving.test_server import as_bytes, url_of
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly
TARGET = {"height": 32, "width": 32, "channels": 3, "resize": "stretch-bilinear", "crop_pct": 1.0, "mean": None}


@pytest.fixture
def python_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


@pytest.mark.integration
@pytest.mark.usefixtures("python_of_the_server")
class TestDecoder:
    @pytest.fixture
    def decoder(self) -> Iterator[Decoder]:
        opened = Decoder(TARGET)
        yield opened
        opened.close()

    def test_it_starts_when_the_environment_forbids_imports_from_the_current_folder(
        self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
        assert isinstance(decoder.pixels(encoded(photo(50, 40), "PNG")), bytes)

    def test_it_has_a_low_priority_and_starts_again(self, decoder: Decoder) -> None:
        image = encoded(photo(50, 40), "PNG")
        decoder.pixels(image)
        process = decoder._process
        assert process is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        process.kill()
        process.wait()
        assert decoder.pixels(image) == "the process that decodes large images ended while it decoded this image"
        assert isinstance(decoder.pixels(image), bytes)


class TestServer:
    @pytest.mark.parametrize("protocol", ["grpc", "http"])
    def test_too_many_pixels_are_refused_with_the_budget(self, protocol: str, limited_server: TritonServer) -> None:
        bomb = png(7000, 7000, b"")  # pixels are counted from the header: these cannot be decoded
        with TritonConnection(url_of(limited_server, protocol)) as connection:
            with pytest.raises(
                RequestRejectedError,
                match=r"the images of the request have 98000000 pixels; the maximum is 60000000 pixels in a request",
            ):
                connection.infer("gmmvit", "IMAGE", as_bytes(bomb, bomb))
            assert connection.infer("gmmvit", "IMAGE", as_bytes(encoded(photo(32, 32), "PNG"))).shape == (1, 10)

    @pytest.mark.parametrize("protocol", ["grpc", "http"])
    def test_large_images_get_the_pixels_of_this_process(
        self, protocol: str, limited_server: TritonServer, bundle: Bundle
    ) -> None:
        images = [encoded(photo(*size, seed=n), "JPEG") for n, size in enumerate([(1500, 900), (40, 30), (1200, 1300)])]
        with TritonConnection(url_of(limited_server, protocol)) as connection:
            made = connection.infer("gmmvit_preprocess", "IMAGE", as_bytes(*images), output="pixels")
        expected = np.stack([bundle.manifest.image.pixels_from_bytes(image) for image in images])
        np.testing.assert_array_equal(made, expected)

    def test_images_of_requests_in_a_batch_get_their_own_answers(
        self, limited_server: TritonServer, bundle: Bundle
    ) -> None:
        """The model decodes the images of all requests of a batch together; a damaged image fails its own request."""
        sizes = [(40, 30), (400, 500), (300, 700), (32, 32)]
        requests = [
            as_bytes(*(encoded(photo(*sizes[(n + k) % 4], seed=n + k), "PNG") for k in range(1 + n % 3)))
            for n in range(24)
        ]
        damaged = as_bytes(png(300, 300, b""))
        with TritonConnection(limited_server.grpc_url) as connection, ThreadPoolExecutor(16) as pool:

            def made(images: np.ndarray) -> np.ndarray | str:
                try:
                    return connection.infer("gmmvit_preprocess", "IMAGE", images, output="pixels")
                except RequestRejectedError as exc:
                    return str(exc)

            before = connection.counts("gmmvit_preprocess")
            answers = list(pool.map(made, [*requests, damaged] * 4))
            images, executions = np.subtract(connection.counts("gmmvit_preprocess"), before)
        assert executions < len(answers) <= images  # the batcher combined requests
        for images_of, answer in zip([*requests, damaged] * 4, answers, strict=True):
            if images_of is damaged:
                assert "image 0: the PNG image is damaged or truncated" in str(answer)
                continue
            expected = [bundle.manifest.image.pixels_from_bytes(data) for (data,) in images_of]
            np.testing.assert_array_equal(answer, np.stack(expected))

    def test_small_images_do_not_wait_and_more_is_refused(self, limited_server: TritonServer) -> None:
        """While two requests of 49 million pixels wait, small requests are answered, and a third is refused."""
        bomb, small = flat_png(7000, 7000), encoded(photo(32, 32), "PNG")
        with TritonConnection(limited_server.grpc_url) as connection, ThreadPoolExecutor(3) as pool:
            large = [pool.submit(infer_again_if_refused, connection, as_bytes(bomb)) for _ in range(2)]
            refusal = None
            answered = 0
            while refusal is None and not any(future.done() for future in large):
                assert connection.infer("gmmvit", "IMAGE", as_bytes(small)).shape == (1, 10)
                answered += 1
                refusal = refusal_of(limited_server, png(7000, 7000, b""))
            assert refusal is not None, "both large requests ended before a third was refused"
            assert not any(future.done() for future in large)
            assert all(future.result().shape == (1, 10) for future in large)
        assert answered >= 1
        assert "UNAVAILABLE" in str(refusal.status())
        assert "more than 120000000 pixels of large images would wait" in refusal.message()

    def test_images_of_several_clients_do_not_wait_for_a_large_one(self, limited_server: TritonServer) -> None:
        images = as_bytes(encoded(photo(32, 32), "PNG"), flat_png(1500, 1500))
        tensor = grpc.InferInput("IMAGE", images.shape, "BYTES")
        tensor.set_data_from_numpy(images)
        with grpc.InferenceServerClient(limited_server.grpc_url.removeprefix("grpc://")) as client:
            assert client.infer("gmmvit", [tensor]).as_numpy("logits").shape == (2, 10)
            with pytest.raises(InferenceServerException, match="large images are taken one by one"):
                client.infer("gmmvit", [tensor], parameters={GROUPED: True})

    def test_large_images_are_answered_before_the_server_stops(self, limited_server: TritonServer) -> None:
        """The model answers what it took. An ensemble cannot: its network takes no request of a server that stops."""
        running = TritonServer(limited_server.repository, options=ServerOptions(**FREE_PORTS))
        with running, TritonConnection(running.grpc_url) as connection, ThreadPoolExecutor(1) as pool:
            images = as_bytes(flat_png(7000, 7000))
            answer = pool.submit(connection.infer, "gmmvit_preprocess", "IMAGE", images, output="pixels")
            wait_until(lambda: "large images" in kinds_of(running.pid).values(), "a process that decodes the image")
            running.stop()
            assert answer.result().shape == (1, 32, 32, 3)


def infer_again_if_refused(connection: TritonConnection, images: np.ndarray) -> np.ndarray:
    """Send a request again while the image of `refusal_of` waits."""

    def answers() -> list[np.ndarray]:
        with contextlib.suppress(ServerError):
            return [connection.infer("gmmvit", "IMAGE", images)]
        return []

    return wait_until(answers, "an answer to a large image")[0]


def refusal_of(server: TritonServer, image: bytes) -> InferenceServerException | None:
    """Send an image whose pixels cannot be decoded; return the refusal if it concerns the pixels that wait."""
    tensor = grpc.InferInput("IMAGE", [1, 1], "BYTES")
    tensor.set_data_from_numpy(as_bytes(image))
    with grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        try:
            client.infer("gmmvit", [tensor])
        except InferenceServerException as exc:
            return exc if "would wait" in exc.message() else None
    raise AssertionError("an image without pixels was decoded")


@pytest.mark.integration
def test_a_budget_below_the_input_of_the_network_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected at least 1024, the pixels of an input of the network, got 1023"):
        repository_from_bundle(bundle, tmp_path / "r", RepositoryOptions(request_pixels=1023))
    with pytest.raises(InputError, match="request_pixels: expected at least 1, got 0"):
        RepositoryOptions(request_pixels=0)
