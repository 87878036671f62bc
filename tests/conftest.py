"""Fixtures that are made from the golden files once for all tests."""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.exporting import graphs_of_precisions
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.images.datasets import DATASETS
from gmmvit_deploy.images.spec import ImageSpec
from gmmvit_deploy.inference.cores import cpu_features
from gmmvit_deploy.inference.precision import CALIBRATED
from gmmvit_deploy.measure import turns
from gmmvit_deploy.models.families import model_from_spec
from gmmvit_deploy.models.families.swin import SwinSpec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import MaskKind, MaskSpec
from gmmvit_deploy.runtimes.engines.card import Engine
from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_bundle
from gmmvit_deploy.runtimes.engines.flavors import Flavor, find_flavor, visible_gpu
from gmmvit_deploy.runtimes.engines.options import BuildOptions
from gmmvit_deploy.runtimes.programs.image_batches import open_images
from gmmvit_deploy.serving.repository import Repository, repository_from_bundle
from tests.forked import command_line
from tests.golden_files import EACH_FAMILY as EACH_FAMILY
from tests.golden_files import EXPORTED as EXPORTED
from tests.golden_files import GOLDEN as GOLDEN
from tests.golden_files import LATER as LATER
from tests.golden_files import MANIFEST as MANIFEST
from tests.golden_files import NAMES as NAMES
from tests.golden_files import RELEASED, Golden, golden
from tests.serving.shared import FREE_PORTS as FREE_PORTS
from tests.serving.shared import Running, shared_service


def has_bf16() -> bool:
    return "avx512_bf16" in cpu_features()


_STARTED_OR_EXPORTED = frozenset(
    (
        *("server", "limited_server", "rtx", "gmmvit"),
        *("bundle", "tensor_bundles", "tensor_bundle", "graph", "small_exports"),
    )
)
"""Fixtures that start a process, build an engine or export a model: a test that uses one is an integration test."""


def pytest_configure() -> None:
    # A shell that starts the tests in the background has them, and all that they start, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("repeatable", derandomize=True, database=None)
    settings.load_profile("repeatable")
    # Imports of torch and onnx leave millions of permanent objects, and tracing a model makes millions more for
    # seconds: the collector takes a quarter of an export's time to look through all of them again and again.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind reports objects that Python does not free at its end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the integration tests, and the cases that `make test` leaves out; skip ``gpu`` without a GPU."""
    no_gpu = visible_gpu() is None
    cases = Counter[str]()
    for item in items:
        if _STARTED_OR_EXPORTED.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
        if any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif")):
            continue  # does not count as the first case
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        if (first := item.get_closest_marker("first")) and cases[test] > first.args[0]:
            item.add_marker(pytest.mark.nightly)
    items.sort(key=_own_limit_s, reverse=True)  # so that no worker begins a test of minutes when the others end


def _own_limit_s(item: pytest.Item) -> float:
    """Return the time limit that a long test sets for itself, else 0."""
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit else 0


@pytest.fixture(params=RELEASED)
def each_golden(request: pytest.FixtureRequest) -> Golden:
    return golden(request.param)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _few_rounds() -> Iterator[None]:
    """Tests do not judge speed, and neither do the bundles that they share."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_SECONDS", 0), ("_MIN_ROUNDS", 1)):
            patch.setattr(turns, name, value)
        yield


def rgb(side: int) -> ImageSpec:
    return ImageSpec(height=side, width=side, channels=3)


def cifar_options(**changes: Any) -> ExportOptions:
    cifar = DATASETS["cifar10"]
    values = {"mean": cifar.mean, "std": cifar.std, "labels": cifar.labels, "max_batch": 8}
    return ExportOptions(**{**values, **changes})


@pytest.fixture(scope="session")
def shared_by_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of a test run share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def shared(shared_by_run: Path) -> Path:
    """Return the folder of the bundles that are made only once: of a test run, or of all runs that are given the same
    folder in ``GMMVIT_TEST_BUNDLES``, which must be new: bundles of other code are not noticed.
    """
    return Path(os.environ.get("GMMVIT_TEST_BUNDLES") or shared_by_run).absolute()


def once(path: Path, make: Callable[[Path], object]) -> Bundle:
    """Return the bundle at ``path``; the first process to need it makes it."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
            _freeze_exporter()
    return open_bundle(path)


@functools.cache
def _freeze_exporter() -> None:
    """Freeze what the first export has imported: each of an export's collections looks through it for 0.4 s."""
    gc.collect()
    gc.freeze()


class _Exported(dict[str, Bundle]):
    """Name of a golden checkpoint → its bundle, exported on first use."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Bundle:
        options, case = ExportOptions(input_kind="tensor", max_batch=8), golden(name)
        self[name] = once(
            self._folder / name, lambda out: bundle_from_checkpoint(case.path, out, options, hints=case.hints)
        )
        return self[name]


@pytest.fixture(scope="session")
def tensor_bundles(shared: Path) -> dict[str, Bundle]:
    """Every golden checkpoint, exported with ``--input tensor``."""
    return _Exported(shared)


@pytest.fixture(scope="session")
def bundle(shared: Path) -> Bundle:
    """``vit_gmm`` with pixels as input and CIFAR-10's normalisation and labels."""
    path = golden("vit_gmm").path
    return once(shared / "pixels", lambda out: bundle_from_checkpoint(path, out, cifar_options()))


@pytest.fixture(scope="session")
def tensor_bundle(shared: Path) -> Bundle:
    """As ``bundle``, but normalised outside the graph: on a server, in the preprocessing model."""
    path, options = golden("vit_gmm").path, cifar_options(input_kind="tensor")
    return once(shared / "normalised_outside", lambda out: bundle_from_checkpoint(path, out, options))


@pytest.fixture(scope="session")
def features_bundle(shared: Path) -> Bundle:
    """``vit_gmm`` with features of unit length, and no logits."""
    path, options = golden("vit_gmm").path, cifar_options(outputs="features", normalise=True, labels=None)
    return once(shared / "features", lambda out: bundle_from_checkpoint(path, out, options))


@pytest.fixture(scope="session")
def both_bundle(shared: Path) -> Bundle:
    """``vit_gmm`` with logits, and features of unit length."""
    path, options = golden("vit_gmm").path, cifar_options(outputs=("logits", "features"), normalise=True)
    return once(shared / "both_outputs", lambda out: bundle_from_checkpoint(path, out, options))


def small_swin(kind: MaskKind) -> Model:
    """A Swin with shifted windows, and heads wide enough for our kernel (heads of the golden Swin are narrower)."""
    torch.manual_seed(0)
    spec = SwinSpec(
        image_size=16,
        patch_size=2,
        classes=10,
        dim=32,
        depths=(2, 2),
        heads=(2, 4),
        window=4,
        mlp_dims=(64, 128),
        mask=MaskSpec(kind=kind, kernels=3) if kind == "gmm" else MaskSpec(),
    )
    return model_from_spec(spec).eval()


def photo_pixels(seed: int, count: int) -> np.ndarray:
    """Return pixels (count, 32, 32, 3) with the contrasts of photographs: smooth patches, not white noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return coarse.repeat(8, axis=1).repeat(8, axis=2)


@pytest.fixture(scope="session")
def calibration_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "images.npz"
    np.savez(path, images=photo_pixels(5, 64))
    return path


def _exporting_once(export: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``export`` for the networks of one bundle, of which several precisions have the same form."""
    made: dict[tuple[Any, ...], Any] = {}

    def exported(model: Model, **options: Any) -> Any:
        form = tuple((name, tensor.shape) for name, tensor in model.state_dict().items())
        if form not in made:
            made[form] = export(model, **options)
        return made[form].clone()

    return exported


@pytest.fixture(scope="session")
def precise_bundle(bundle: Bundle, calibration_images: Path, shared: Path) -> Bundle:
    """A copy of ``bundle`` with all precisions beside its float32 graph."""

    def make(out: Path) -> None:
        staging = out.with_name("precise.partial")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(bundle.path, staging)
        opened = open_bundle(staging)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs_of_precisions, "onnx_from_model", _exporting_once(onnx_from_model))
            for precision in ("fp16", "bf16", "int8", "fp8"):
                images = open_images(opened, str(calibration_images), limit=64) if precision in CALIBRATED else None
                variant_from_bundle(opened, precision, calibration=images)
        staging.rename(out)

    return once(shared / "precise", make)


@pytest.fixture(scope="session")
def rtx() -> Flavor:
    return find_flavor("tensorrt-rtx")


@pytest.fixture(scope="session")
def engine(precise_bundle: Bundle, rtx: Flavor, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A real engine: fp16, tensorrt-rtx, compute capability 8.9."""
    return engine_from_bundle(
        precise_bundle,
        open_variant(precise_bundle, "fp16"),
        BuildOptions(precision="fp16", capabilities=("8.9",)),
        rtx,
        out=tmp_path_factory.mktemp("engine") / "engine",
        mask_cost=True,
    )


@pytest.fixture(scope="session")
def repository(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return repository_from_bundle(bundle, tmp_path_factory.mktemp("repository") / "models")


@pytest.fixture(scope="session")
def server(bundle: Bundle, shared_by_run: Path) -> Running:
    """A real Triton server with the pixel bundle, which all processes of the run ask."""
    return shared_service("bare", bundle.path, shared_by_run)["server"]


@pytest.fixture(scope="session")
def gmmvit() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in a process of its own; with options of `subprocess.run`, in a new interpreter."""

    def run(*arguments: str | Path, timeout_s: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
        words = [*map(str, arguments)]
        if not options:
            return command_line(words, timeout_s=timeout_s)
        command = [sys.executable, "-m", "gmmvit_cli.main", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)

    return run
