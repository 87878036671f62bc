"""Hold the networks of a ready server to the reference outputs of their bundle before the server is announced.

The networks of the Python backend compare themselves when they are loaded; Triton's own backends cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import GOLDEN_FILE
from gmmvit_deploy.errors import RepositoryError, ServerError
from gmmvit_deploy.runtimes.programs.reference_outputs import wrong_in_batch
from gmmvit_deploy.runtimes.programs.triton import TritonConnection


def require_right_networks(grpc_url: str, repository: Path, limits: Mapping[str, Mapping[str, float]]) -> None:
    """Compare the outputs of networks with the reference outputs, for an image alone and for the largest batch.

    limits: as in `ServedModels`.
    Errors: ServerError when an output exceeds its limit, or has another shape, or when the server does not answer.
    RepositoryError when the repository has no reference outputs.
    """
    import numpy as np

    for network, of_outputs in limits.items():
        file = repository / network / "1" / GOLDEN_FILE
        try:
            with np.load(file, allow_pickle=False) as golden:
                inputs, expected = golden["inputs"], {output: golden[output] for output in of_outputs}
        except (OSError, ValueError, KeyError) as exc:
            raise RepositoryError(
                f"{file}: expected the reference outputs of {network}, got {exc}",
                hint="type gmmvit repository BUNDLE to write the repository again",
            ) from exc
        with TritonConnection(grpc_url) as connection:
            served = connection.model(network)
            (name,) = served.inputs
            answers = partial(connection.infer_all, network, name, outputs=tuple(of_outputs))
            for size in sorted({1, served.max_batch}):
                rows = {output: values[:size] for output, values in expected.items()}
                if problem := wrong_in_batch(answers, inputs[:size], rows, of_outputs, size):
                    raise ServerError(
                        f"{network} is wrong on this server: {problem}",
                        hint="type --runner with another runner, such as openvino or onnxruntime, which the Python "
                        "backend runs, or write the repository again",
                    )
