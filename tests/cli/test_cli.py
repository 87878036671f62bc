"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gmmvit_cli.options import labels_from, normalisation_from
from gmmvit_cli.output import print_json
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.exporting.options import ExportOptions
from gmmvit_deploy.images.resize_rules import RESIZE_RULES
from tests.checkpoints.test_loading import released_state
from tests.cli.terminal import Gmmvit, done, gmmvit_here, refused, without_progress
from tests.conftest import GOLDEN, golden
from tests.export.test_channels import SPEC, saved_checkpoint
from tests.inference.test_preprocess import encoded, photo
from tests.models.families.small_specs import SMALL
from tests.serving.shared import Running

CIFAR = ("--dataset", "cifar10")
LABELS = ("--labels", "0,1,2,3,4,5,6,7,8,9")


def test_version(gmmvit: Gmmvit) -> None:
    assert gmmvit("--version").stdout.startswith("gmmvit-deploy 0.")


def test_inspect(gmmvit: Gmmvit) -> None:
    report = json.loads(gmmvit("inspect", GOLDEN / "vit_gmm.pth", "--json").stdout)
    assert (report["family"], report["mask"], report["trainable_parameters"]) == ("vit", "gmm", 62548)
    assert report["spec"]["heads"] == 3
    assert "underflowed" in report["audit"][0]["what"]
    table = gmmvit("inspect", GOLDEN / "vit_gmm.pth").stdout
    assert "62,548" in table
    assert "gmm, K=5, per head, stored base" in table


def test_export_parity_repository_classify(gmmvit: Gmmvit, tmp_path: Path) -> None:
    bundle, models = tmp_path / "bundle", tmp_path / "models"
    average = {name: tensor * 1.01 for name, tensor in released_state().items()}
    torch.save({"model": released_state(), "ema": average}, tmp_path / "net.pth")
    stated = ("--set", "weights=trained", "--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", *LABELS)
    exported = done(gmmvit("export", tmp_path / "net.pth", "-o", bundle, *stated))
    assert "training checkpoint, weights under 'model'" in exported.out
    assert "10: 0, 1, 2, 3, 4, …" in exported.out
    assert exported.out.rstrip().endswith(str(bundle))
    parity = done(gmmvit("parity", bundle, "--runner", "eager,onnxruntime", "--json"))
    assert json.loads(parity.out)["verdict"] == "passed"
    written = gmmvit("repository", bundle, "-o", models)
    assert written.stdout == f"{models}\n"
    (runner,) = {line for line in written.stderr.splitlines() if line.startswith("runner: ")}
    (tmp_path / "image.png").write_bytes(encoded(photo(50, 50), "PNG"))
    answer = gmmvit("classify", tmp_path / "image.png", "--bundle", bundle, "--top", 2, "--json")
    (only,) = json.loads(answer.stdout)
    assert len(only["predictions"]) == 2
    assert f"runner: {only['runner']}" == runner  # both take the choice of export
    assert only["bundle"] == open_bundle(bundle).sha256
    plain = gmmvit("classify", tmp_path / "image.png", "--bundle", bundle, "--runner", "openvino", "--json")
    assert json.loads(plain.stdout)[0]["runner"] == "openvino"
    refused(gmmvit_here("classify", "x", "--url", "grpc://localhost:1", "--runner", "openvino"), "needs --bundle")
    refused(gmmvit("serve", models, "--runner", "openvino"), "--runner needs a bundle")


@pytest.mark.nightly
@pytest.mark.integration
def test_a_command_writes_nothing_but_progress_to_stderr(tmp_path: Path) -> None:
    """In a new interpreter, where libraries warn at import; tests/demo/test_demo.py checks `gmmvit demo`."""
    printed = []
    for words in (
        ("export", GOLDEN / "vit_gmm.pth", "-o", tmp_path / "bundle", "--input", "tensor", "--json"),
        ("parity", tmp_path / "bundle", "--runner", "onnxruntime"),
    ):
        command = [sys.executable, "-m", "gmmvit_cli.main", *map(str, words)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert (answer.returncode, without_progress(answer.stderr)) == (0, "")
        printed.append(answer.stdout)
    exported, checked = printed
    assert json.loads(exported)["manifest"] == json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert checked.rstrip().endswith("passed")


@pytest.mark.first(1)
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_classify_and_parity_on_a_live_server(
    protocol: str, gmmvit: Gmmvit, server: Running, bundle: Bundle, tmp_path: Path
) -> None:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    (tmp_path / "a.png").write_bytes(encoded(photo(32, 32), "PNG"))
    (tmp_path / "b.jpg").write_bytes(encoded(photo(99, 50), "JPEG"))
    remote = done(gmmvit("classify", tmp_path, "--url", url, "--json"))
    local = gmmvit("classify", tmp_path, "--bundle", bundle.path, "--json")
    for a, b in zip(json.loads(remote.out), json.loads(local.stdout), strict=True):
        assert [p["label"] for p in a["predictions"]] == [p["label"] for p in b["predictions"]]
    parity = gmmvit("parity", bundle.path, "--runner", f"triton-{protocol}", "--url", url, "--json")
    assert json.loads(parity.stdout)["verdict"] == "passed"


def test_classify_names_the_bad_file_and_answers_the_others(gmmvit: Gmmvit, bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(photo(32, 32), "PNG"))
    (tmp_path / "b.png").write_bytes(b"no image")
    answer = gmmvit("classify", "nowhere.png", tmp_path, "--bundle", bundle.path)
    assert answer.returncode == 1
    assert "a.png: " in answer.stdout
    assert f"Error: {tmp_path / 'b.png'}: the file is not a JPEG" in answer.stderr
    assert "Error: nowhere.png: no such file or folder" in answer.stderr
    assert "hint: 2 of 3 files could not be classified" in answer.stderr
    answered = json.loads(gmmvit("classify", "nowhere.png", tmp_path, "--bundle", bundle.path, "--json").stdout)
    assert [Path(answer["path"]).name for answer in answered if answer["error"]] == ["b.png", "nowhere.png"]
    refused(
        gmmvit("classify", "nowhere.png", "none/*.png", "--bundle", bundle.path), "nowhere.png: no ", "none/*.png: no "
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"stowaway": torch.zeros(2)}, "unknown key stowaway"),
        ({"mlp_head.1.bias": torch.full((10,), float("nan"))}, "NaN or infinite"),
    ],
    ids=["extra key", "nan"],
)
def test_bad_checkpoints_are_refused_and_leave_no_files(
    state: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save(released_state() | state, path)
    error, _ = refused(gmmvit_here("export", path, "-o", tmp_path / "out" / "bundle", *CIFAR), message)
    assert error.startswith(f"Error: {path}: ")
    assert list(tmp_path.iterdir()) == [path]


def test_mean_and_std_with_spaces_or_commas() -> None:
    for between in (" ", ","):
        read = normalisation_from(None, between.join(["0.5", "0.4", "0.3"]), between.join(["1", "1", "2"]))
        assert (read.mean, read.std) == ((0.5, 0.4, 0.3), (1.0, 1.0, 2.0))


def test_one_mean_is_that_of_every_channel() -> None:
    read = normalisation_from(None, "0.5", "0.2")
    image = ExportOptions(mean=read.mean, std=read.std).image_spec(SMALL["vit"])
    assert (image.channels, image.mean, image.std) == (3, (0.5,) * 3, (0.2,) * 3)


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:9", "ftp://host"])
def test_an_address_without_a_server(url: str) -> None:
    refused(gmmvit_here("classify", GOLDEN / "manifest.json", "--url", url), url)


@pytest.mark.nightly
@pytest.mark.integration
def test_a_disk_that_refuses_to_take_more(tmp_path: Path) -> None:
    """A real write error: no file may grow beyond 64 KiB, as on a disk that is nearly full."""
    command = f"ulimit -f 64; exec {sys.executable} -m gmmvit_cli.main export "
    command += f"{GOLDEN / 'vit_gmm.pth'} -o {tmp_path / 'deep' / 'bundle'} --dataset cifar10"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    errors = without_progress(answer.stderr)
    assert errors.startswith(f"Error: {tmp_path / 'deep' / 'bundle'}: cannot be written: File too large")
    assert list(tmp_path.iterdir()) == []


def test_classify_on_a_server_without_the_model(gmmvit: Gmmvit, server: Running) -> None:
    answer = gmmvit("classify", GOLDEN / "manifest.json", "--url", server.grpc_url, "--served-name", "resnet")
    refused(answer, f"the server at {server.grpc_url} has no model 'resnet'")


@pytest.mark.nightly
def test_what_was_not_foreseen_is_an_error_too(gmmvit: Gmmvit, tmp_path: Path) -> None:
    (tmp_path / "jaxtyping.py").write_text("raise RuntimeError('a broken install')")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    answer = gmmvit("inspect", GOLDEN / "vit_gmm.pth", env=environment)
    assert answer.returncode == 1
    assert answer.stderr.startswith("Error: unexpected RuntimeError: a broken install")
    assert "GMMVIT_DEBUG=1" in answer.stderr
    assert "Traceback" not in answer.stderr
    with_trace = gmmvit("inspect", GOLDEN / "vit_gmm.pth", env={**environment, "GMMVIT_DEBUG": "1"})
    assert "Traceback" in with_trace.stderr


@pytest.mark.nightly
@pytest.mark.integration
def test_a_reader_that_goes_away(bundle: Bundle) -> None:
    command = f"{sys.executable} -m gmmvit_cli.main parity {bundle.path} --json | true"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in answer.stderr
    assert "Exception ignored" not in answer.stderr


def test_doctor(gmmvit: Gmmvit) -> None:
    checks = {check["name"]: check for check in json.loads(gmmvit("doctor", "--json").stdout)}
    for name in ("eager", "onnxruntime", "openvino", "triton-grpc", "triton-http", "tritonserver"):
        assert checks[name]["works"], checks[name]
    for check in checks.values():
        assert check["detail"]
    assert checks["haproxy"]["works"] or checks["haproxy"]["fix"] == "apt-get install haproxy"
    assert re.search(r"; Triton \d+\.\d+\.\d+ .*has (published|no) fault", checks["tritonserver"]["detail"])
    assert [name for name, check in checks.items() if check["kind"] == "kernel"] == ["openvino+kernels"]
    for name in ("onnxruntime-cuda", "onnxruntime-tensorrt"):
        assert checks[name]["works"] or checks["nvidia gpu"]["works"] or "no GPU is visible" in checks[name]["detail"]
    absent = [check for check in checks.values() if check["kind"] == "engine" and not check["works"]]
    assert all(check["fix"].startswith("pip install ") for check in absent)


def test_labels_are_read_without_a_byte_order_mark_and_one_label_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n", encoding="utf-8-sig")
    assert labels_from(str(tmp_path / "labels.txt")) == ("cat", "dog")
    assert labels_from("defect") == ("defect",)
    absent = ("export", GOLDEN / "vit_gmm.pth", "-o", tmp_path / "b", "--labels", "absent.txt", "--dataset", "cifar10")
    refused(gmmvit_here(*absent), "--labels absent.txt: expected a file with a label on each line")


def test_json_of_a_file_name_that_is_no_utf8_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    print_json({"path": os.fsdecode(b"a\xff.png")})
    assert os.fsencode(json.loads(capfd.readouterr().out)["path"]) == b"a\xff.png"


# ---- export asks for the resize rule of checkpoints that do not state it ---------------------------------------------


RMT = ("--image-size", "64", "--set", "decomposed_stages=1,2,3")


def wrong(*arguments: str | Path) -> tuple[str, str]:
    """Return (message, hint) of a command that ends with an error."""
    return refused(gmmvit_here(*arguments, columns=1000))


@pytest.mark.parametrize(("name", "options"), [("rmt_2023", RMT), ("vp_vit", ("--set", "heads=4"))])
def test_export_asks_for_the_resize_rule(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """The help of --resize names the families that need no rule, and the page of the family mentions the option."""
    stated = ("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5")
    message, hint = wrong("export", golden(name).path, "-o", tmp_path / "bundle", *stated, *options)
    assert message.endswith("the checkpoint does not state the resize rule")
    assert hint.startswith("add --resize METHOD; or add --input tensor")
    assert hint.endswith(f"METHOD: {', '.join(RESIZE_RULES)}")
    family = "vit_pytorch" if name == "vp_vit" else name.partition("_")[0]
    page = Path(__file__).parents[2] / "docs" / "pages" / "models" / f"{family}.md"
    assert "`--resize`" in page.read_text()


# ---- key, certificates and address of a service ----------------------------------------------------------------------


FILE = GOLDEN / "manifest.json"


@pytest.mark.parametrize("option", ["--key-file", "--ca"])
@pytest.mark.parametrize("by_variable", [False, True], ids=["option", "variable"])
def test_a_file_that_does_not_exist(
    option: str, by_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = {"--key-file": "GMMVIT_KEY_FILE", "--ca": "GMMVIT_CA"}[option]
    path = str(tmp_path / "nowhere")
    if by_variable:
        monkeypatch.setenv(variable, path)
    answer = gmmvit_here("classify", FILE, *(() if by_variable else (option, path)))
    _, hint = refused(answer, f"{option} {path}: no such file")
    assert variable in hint


# ---- resize rules ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_checkpoint(tmp_path_factory.mktemp("resize") / "model.pth", SPEC)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (
            ("--crop-pct", "0.9"),
            "--crop-pct: expected 1 with the resize rule stretch-bilinear, because this rule does not crop, got 0.9",
            "center-bilinear, shortest-bilinear, squash-bilinear or border-bilinear for a rule that crops",
        ),
        (("--resize", "border-bicubic"), "the resize rule border-bicubic needs the mean of each channel", "--mean"),
    ],
)
def test_what_does_not_fit(options: tuple[str, ...], error: str, hint: str, checkpoint: Path, tmp_path: Path) -> None:
    answer = gmmvit_here("export", checkpoint, "-o", tmp_path / "bundle", "--input", "tensor", *options)
    assert hint in refused(answer, error)[1]
    assert not (tmp_path / "bundle").exists()
