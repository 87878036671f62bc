"""Search the number of threads of the preprocessing that serves the most images of a kind.

Every trial starts a server whose ensemble decodes copies of an image that the user gives, for 16 clients at once, and
checks the server's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gmmvit_deploy.artifacts import Bundle
from gmmvit_deploy.bench.loadgen import Work, drive
from gmmvit_deploy.bench.outputs import Expected
from gmmvit_deploy.errors import ServerError
from gmmvit_deploy.leftovers import temporary_folder
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtime.cores import cores
from gmmvit_deploy.runtime.triton import TritonConnection
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer

__all__ = ["CLIENTS", "PreprocessTrial", "candidates", "encoded_batch", "fastest", "tune_preprocessing"]

CLIENTS = 16
_IMAGES = 64
_NEAR = 0.97
"""A trial with fewer threads and at least this share of the highest throughput is better: it needs less memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessTrial:
    """A trial.  threads: as `RepositoryOptions.preprocess_threads`.  images_per_second: of the ensemble."""

    threads: int
    images_per_second: float


def candidates() -> tuple[int, ...]:
    """Return the numbers of threads to try: a thread for each core, half as many, and a single thread."""
    count = cores()
    return tuple(dict.fromkeys((count, max(1, count // 2), 1)))


def fastest(trials: Sequence[PreprocessTrial]) -> PreprocessTrial:
    """Return the trial with the fewest threads among the trials near the highest throughput."""
    highest = max(trial.images_per_second for trial in trials)
    near = [trial for trial in trials if trial.images_per_second >= _NEAR * highest]
    return min(near, key=lambda trial: trial.threads)


def encoded_batch(images: Sequence[bytes]) -> NDArray[np.object_]:
    """Return encoded images as the input IMAGE (N, 1)."""
    batch = np.empty((len(images), 1), dtype=np.object_)
    for row, data in enumerate(images):
        batch[row, 0] = data
    return batch


def tune_preprocessing(
    bundle: Bundle, settings: RepositoryOptions, image: bytes, *, on_progress: OnProgress = ignore
) -> tuple[PreprocessTrial, ...]:
    """Measure the ensemble's throughput with each of `candidates`.

    settings: the settings of the network.  image: an encoded image, such as those that clients will send.
    Errors: UnusableImage when the image cannot be used.
    ServerError when the server fails, or gives wrong answers.
    """
    pixels = bundle.manifest.image.pixels_from_bytes(image)
    expected = Expected(bundle, bundle.inputs_from_pixels(pixels[None]))
    encoded = encoded_batch([image])
    output = bundle.manifest.output_names[0]
    trials = []
    tried = candidates()
    for number, threads in enumerate(tried):
        on_progress(Progress(f"preprocessing with {threads} threads", number, len(tried)))
        options = replace(settings, preprocess_threads=threads)
        with temporary_folder("tune") as folder:
            models = repository_from_bundle(bundle, folder / "models", options).path
            ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0)
            with TritonServer(models, options=ports) as server, TritonConnection(server.grpc_url) as connection:

                def run(batch: NDArray[np.object_], connection: TritonConnection = connection) -> NDArray[np.float32]:
                    return connection.infer(settings.name, "IMAGE", batch, output=output)

                work = Work(scenario="Offline", inputs=encoded, queries=_IMAGES, callers=CLIENTS)
                turns = [drive(run, work) for _ in range(2)]
        for turn in turns:
            largest = expected.largest(turn.indices, turn.outputs)
            check = expected.judged(
                settings.precision,
                for_cpu=not settings.on_gpu,
                answers=_IMAGES,
                largest=largest,
                sha256=turn.outputs_sha256,
            )
            if not check.right:
                raise ServerError(
                    f"{settings.name}: the answers for the image differ from PyTorch's by {largest:.2g}, expected at "
                    f"most {check.limit:.2g}"
                )
        rate = max(turn.samples_per_second for turn in turns)
        trials.append(PreprocessTrial(threads=threads, images_per_second=rate))
    return tuple(trials)
