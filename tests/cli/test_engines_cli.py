"""``convert``, ``build``, and how other commands handle precisions and engines, as a user runs them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.runtimes.engines.card import open_engine
from tests.cli.terminal import Gmmvit, done, gmmvit_here, refused
from tests.conftest import GOLDEN
from tests.serving.shared import Running
from tests.serving.test_repository import served_by_tensorrt

EXPORT = ("--mean", "0,0,0", "--std", "1,1,1", "--labels", "a,b,c,d,e,f,g,h,i,j", "--max-batch", "8")


@pytest.mark.nightly
def test_export_convert_build(gmmvit: Gmmvit, calibration_images: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    precisions = ("--precision", "fp32,fp16,int8", "--calibration", calibration_images, "--calibration-images", "16")
    made = done(gmmvit("export", GOLDEN / "vit_gmm.pth", "-o", bundle, *EXPORT, *precisions, "--json"))
    answer = json.loads(made.out)
    assert list(answer["precisions"]) == ["fp16", "int8", "int8-static"]
    assert answer["precisions"]["int8"]["calibration"]["images"] == 16
    assert answer["precisions"]["int8-static"]["calibration"]["images"] == 16
    more = done(gmmvit("convert", bundle, "--precision", "bf16,int8", *precisions[2:], "--force"))
    assert "blocks.2.attention" in more.out
    assert re.search(r"int8 +\S+ +\S+ +16 images", more.out)
    assert re.search(r"int8, static, for CPUs +\S+ +\S+ +16 images", more.out)
    written = [str(bundle / f"graphs/{name}.onnx") for name in ("bf16", "int8-static", "int8")]
    assert more.out.splitlines()[-3:] == written
    build = ("build", bundle, "--compute-capability", "8.9", "--require-fused", "--require-precision")
    text = done(gmmvit(*build, "--mask-cost", "--batch", "1", "--batch", "2:4:8"))
    assert "6 of 6 attentions run as a single kernel" in text.out
    assert "0 kernels and" in text.out
    assert text.out.splitlines()[-1] == str(bundle / "engines" / "fp16-tensorrt-rtx-8.9")
    assert open_engine(bundle / "engines" / "fp16-tensorrt-rtx-8.9").card.max_batch == 8
    refused(gmmvit(*build), "fp16-tensorrt-rtx-8.9 exists")
    page = ("--report", tmp_path / "engine.html")
    replaced = gmmvit(
        *build, "--precision", "int8", "-o", tmp_path / "engine", "--log", tmp_path / "log", *page, "--json"
    )
    card = json.loads(replaced.stdout)["card"]
    assert (card["precision"], card["misses"]) == ("int8", [])
    assert "Layers:" in (tmp_path / "log").read_text()
    assert "Every matrix product runs in the type that int8 promises" in page[1].read_text()
    assert replaced.stderr.splitlines()[-1] == f"report: {page[1]}"
    refused(gmmvit(*build, *page, "-o", tmp_path / "other"), "engine.html exists")
    assert not (tmp_path / "other").exists()
    parity = gmmvit("parity", bundle, "--precision", "int8", "--json")
    assert (parity.returncode, json.loads(parity.stdout)["verdict"]) == (3, "undecided")  # no images judge int8


def test_calibration_images_of_the_wrong_size(bundle: Bundle, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 28, 28, 3), np.uint8))
    answer = gmmvit_here("convert", bundle.path, "--precision", "int8", "--calibration", tmp_path / "x.npy")
    refused(answer, "expected uint8 (N, 32, 32, 3), got uint8 (4, 28, 28, 3)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--flavor", "tensorrt"), "tensorrt is not installed"),
        ((), "no compute capability was named"),
        (("--compute-capability", "8.9", "--batch", "1:8:64"), "expected a maximum batch of at most 8"),
        (("--compute-capability", "8.9", "--timing-cache", "x"), "does not support --timing-cache"),
        (("--compute-capability", "8.9", "--precision", "fp32", "--require-fused"), "float32: fused kernels exist"),
    ],
)
def test_build_refuses(arguments: tuple[str, ...], message: str, precise_bundle: Bundle) -> None:
    refused(gmmvit_here("build", precise_bundle.path, *arguments), message)
    assert not (precise_bundle.path / "engines").exists()


def test_build_of_what_is_not_there(bundle: Bundle, tmp_path: Path) -> None:
    named = ("--compute-capability", "8.9")
    neither = "expected the graph graphs/fp16.onnx and its record graphs/fp16.json, got neither"
    assert "gmmvit convert" in refused(gmmvit_here("build", bundle.path, *named), neither)[1]
    refused(gmmvit_here("build", tmp_path / "nothing", *named), "expected a bundle, but this path does not exist")
    refused(gmmvit_here("build", bundle.onnx_path, *named), "is required for an ONNX file")


def test_doctor_of_a_bundle(
    gmmvit: Gmmvit, precise_bundle: Bundle, engine: object, server: Running, tmp_path: Path
) -> None:
    bundle = tmp_path / "b"
    shutil.copytree(precise_bundle.path, bundle)
    without_engine = gmmvit("doctor", bundle, "--server-version", "25.04")
    assert without_engine.returncode == 1
    assert "the bundle has no engine" in without_engine.stdout
    (bundle / "engines").mkdir()
    served_by_tensorrt(engine, bundle / "engines" / "served")
    fits = done(gmmvit("doctor", bundle, "--server-version", "25.04", "--json"))
    checks = {(check["kind"], check["name"]): check for check in json.loads(fits.out)}
    assert checks["graph", "graphs/int8.onnx"]["works"]
    assert checks["engine", "served"]["works"]
    assert "has TensorRT 10.9.0, which can load the engine" in checks["server", "served"]["detail"]
    live = gmmvit("doctor", bundle, "--server", server.grpc_url, "--json")  # Triton 2.51: TensorRT 10.5
    assert live.returncode == 1
    (verdict,) = [check for check in json.loads(live.stdout) if check["kind"] == "server"]
    assert "build the engine again with tensorrt 10.5.0" in verdict["detail"]
    done(gmmvit("doctor", bundle, "--server", server.http_url, "--server-tensorrt", "10.9.0"))
    (bundle / "engines" / "served" / "model.plan").write_bytes(b"short")
    assert "the plan is truncated" in gmmvit("doctor", bundle).stdout


def test_doctor_refuses_a_server_without_a_bundle_and_a_server_given_twice(bundle: Bundle) -> None:
    refused(gmmvit_here("doctor", "--server-version", "25.04"), "expected a bundle, because the server options")
    refused(
        gmmvit_here("doctor", bundle.path, "--server-version", "26.09"),
        "the TensorRT of Triton 26.09 is not known",
    )
    both = ("--server-version", "25.04", "--server", "grpc://localhost:1")
    refused(gmmvit_here("doctor", bundle.path, *both), "--server-version and --server exclude each other")


@pytest.mark.nightly
def test_repository_takes_an_engine(gmmvit: Gmmvit, precise_bundle: Bundle, engine: object, tmp_path: Path) -> None:
    plan = served_by_tensorrt(engine, tmp_path / "e").path
    command = ("repository", precise_bundle.path, "-o", tmp_path / "r", "--backend", "tensorrt", "--engine", plan)
    refused(gmmvit(*command, "--server-version", "24.06"), "expected the same version to load the plan, got 10.1.0")
    refused(gmmvit(*command), "the server's TensorRT version is not known")
    done(gmmvit(*command, "--server-version", "25.04"))
    assert (tmp_path / "r" / "gmmvit_network" / "1" / "model.plan").is_file()
