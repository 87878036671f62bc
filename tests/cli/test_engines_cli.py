"""``convert``, ``build``, and how other commands handle precisions and engines, as a user runs them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

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
    replaced = gmmvit(*build, "--precision", "int8", "-o", tmp_path / "engine", "--log", tmp_path / "log", "--json")
    card = json.loads(replaced.stdout)["card"]
    assert (card["precision"], card["misses"]) == ("int8", [])
    assert "Layers:" in (tmp_path / "log").read_text()
    parity = gmmvit("parity", bundle, "--precision", "int8", "--json")
    assert (parity.returncode, json.loads(parity.stdout)["verdict"]) == (3, "undecided")  # no images judge int8


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
    both = ("--server-version", "25.04", "--server", "grpc://localhost:1")
    refused(gmmvit_here("doctor", bundle.path, *both), "--server-version and --server exclude each other")
