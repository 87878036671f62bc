"""A model whose images are cropped and not square, from the bundle to a real Triton server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.programs.triton import TritonConnection
from gmmvit_deploy.serving.model_configs import model_configs
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.server import ServerOptions, TritonServer
from tests.conftest import FREE_PORTS
from tests.export.test_channels import SPEC, exported
from tests.inference.test_preprocess import encoded, photo
from tests.inference.test_timm_preprocess import by_timm
from tests.serving.conftest import joined_repository

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

IMAGES = [photo(51, 37), photo(20, 64, "L"), photo(33, 33), photo(11, 15)]
FILES = [encoded(image, "PNG") for image in IMAGES]
WIDE = ImageSpec(
    height=20, width=33, channels=3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), resize="center-bicubic", crop_pct=0.9
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideSpec(type(SPEC)):  # type: ignore[misc]
    """The spec of a model that takes images of 20×33 pixels."""

    @property
    def image_shape(self) -> tuple[int, int]:
        return (20, 33)


def wide(bundle: Bundle, image: ImageSpec) -> Bundle:
    """Return the bundle, described as if the network took images that are not square."""
    values = {field.name: getattr(bundle.manifest.spec, field.name) for field in fields(bundle.manifest.spec)}
    spec = WideSpec(**{**values, "channels": image.channels})
    return replace(bundle, manifest=replace(bundle.manifest, spec=spec, image=image))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return wide(exported(tmp_path_factory.mktemp("wide"), 3), WIDE)


@pytest.fixture(scope="module")
def server(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with the preprocessing model of a network that is not square."""
    models = joined_repository(
        tmp_path_factory.mktemp("crops"), {"wide": bundle}, threads=1, runner=RunnerName("openvino")
    )
    for model in models.glob("wide*"):
        if model.name != "wide_preprocess":
            shutil.rmtree(model)
    with TritonServer(models, options=ServerOptions(**FREE_PORTS)) as running:
        yield running


def test_server_preprocesses_images_for_a_network_that_is_not_square(server: TritonServer) -> None:
    images = np.array([[file] for file in FILES], dtype=np.object_)
    with TritonConnection(server.grpc_url) as connection:
        pixels = connection.infer("wide_preprocess", "IMAGE", images, output="pixels")
    assert pixels.shape == (4, 20, 33, 3)
    np.testing.assert_array_equal(pixels, np.stack([by_timm(image, WIDE)[0] for image in IMAGES]))


def test_configurations_of_a_network_that_is_not_square(bundle: Bundle, tmp_path: Path) -> None:
    of_tensors = wide(exported(tmp_path, 3, input_kind="tensor"), WIDE)
    for made, shape in ((bundle, [20, 33, 3]), (of_tensors, [3, 20, 33])):
        configs = model_configs(made, RepositoryOptions(runner=RunnerName("openvino")))
        assert list(configs["gmmvit_network"].input[0].dims) == shape
        assert list(configs["gmmvit_preprocess"].output[0].dims) == shape
        settings = json.loads(configs["gmmvit_preprocess"].parameters["preprocessing"].string_value)
        assert settings == {**WIDE.to_json(), "threads": 0}
        assert (settings["height"], settings["width"], settings["crop_pct"]) == (20, 33, 0.9)
