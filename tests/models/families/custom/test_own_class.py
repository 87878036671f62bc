"""Models of a user's own class: what may run, what is refused, and what works without the class."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gmmvit_deploy.bench.outputs import Expected, stored_inputs
from gmmvit_deploy.bundle.artifacts import open_bundle
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.checkpoints.own_class import permit_class_of
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.models.families import CUSTOM, family_of, spec_from_json
from gmmvit_deploy.models.families.custom import CustomSpec
from gmmvit_deploy.models.scores.attention import attention_scores
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.specs import spec_to_json
from gmmvit_deploy.runtimes.runners.eager import EagerRunner
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner
from tests.cli.terminal import Answer, gmmvit_here, without_progress
from tests.conftest import cifar_options
from tests.models.families.custom.conftest import OwnBundle
from tests.models.families.custom.own_files import ARGUMENTS, IMAGE, own_file, save_weights, with_code

pytestmark = pytest.mark.integration


def refused(answer: Answer, *message: str) -> str:
    """Check that a command failed with two lines that contain these texts, and return the lines."""
    assert answer.status == 1, answer
    lines = [line for line in without_progress(answer.err).splitlines() if line != "a line on stdout"]
    assert [line.partition(":")[0] for line in lines] == ["Error", "hint"], answer.err
    for part in message:
        assert part in lines[0], answer.err
    return "\n".join(lines)


# ---- with the class --------------------------------------------------------------------------------------------------


def test_the_bundle_describes_the_class(own_bundle: OwnBundle) -> None:
    spec = own_bundle.bundle.manifest.spec
    assert isinstance(spec, CustomSpec)
    assert (spec.code_file, spec.class_name, spec.model_args) == ("mine.py", "Net", ARGUMENTS)
    assert (spec.image_size, spec.channels, spec.classes) == (16, 3, 5)
    assert family_of(spec) is CUSTOM
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
    assert not any(file.suffix == ".py" for file in own_bundle.bundle.path.iterdir())


def test_the_graph_gives_the_logits_of_the_class(own_bundle: OwnBundle) -> None:
    bundle = own_bundle.bundle
    stored = bundle.golden_set()
    with torch.inference_mode():
        logits = own_bundle.network(torch.from_numpy(stored.tensors)).numpy()
    np.testing.assert_allclose(stored.logits, logits, rtol=0, atol=1e-6)
    with OnnxRuntimeRunner(bundle) as runner:
        for size in (1, 2, 3, 9):
            rows = np.resize(np.arange(len(logits)), size)
            np.testing.assert_allclose(runner.run(stored.inputs[rows]), logits[rows], rtol=0, atol=1e-5)


def test_eager_runs_the_class_once_the_user_names_it(own_bundle: OwnBundle) -> None:
    bundle = own_bundle.bundle
    with pytest.raises(
        InputError, match=r"the class Net of the file mine\.py, and gmmvit runs a file only if"
    ) as caught:
        EagerRunner(bundle)
    assert "add --model mine.py:Net" in caught.value.hint
    permit_class_of(bundle.manifest.spec, own_bundle.model, what="bundle")
    inputs, logits = bundle.golden()
    with EagerRunner(bundle) as runner:
        np.testing.assert_allclose(runner.run(inputs), logits, rtol=0, atol=1e-6)


def test_parity_with_the_class_compares_with_eager_pytorch(own_bundle: OwnBundle) -> None:
    answer = gmmvit_here("parity", own_bundle.bundle.path, "--model", own_bundle.model, "--localize", "--json")
    assert answer.status == 0, answer
    report = json.loads(answer.out)  # what the file prints is not on stdout
    assert "a line on stdout" in answer.err
    assert report["verdict"] == "passed"
    assert {check["name"]: check["verdict"] for check in report["checks"]} == {
        "constants": "passed",
        "reference": "passed",
    }
    checks = {check["name"]: check for check in report["runners"][0]["checks"]}
    assert [numbers["inputs"] for numbers in checks["numeric"]["details"]["sets"]] == ["golden", "random"] * 2
    assert checks["localize"]["verdict"] == "skipped"


def test_inspect_draws_the_attention_of_the_class(own_bundle: OwnBundle, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(own_bundle.bundle.golden_set().images[0])
    words = ("--model", own_bundle.model, "--report", tmp_path / "report.html", "--json")
    answer = gmmvit_here("inspect", own_bundle.bundle.path, "--image", image, *words)
    assert answer.status == 0, answer
    assert "<h2>Image and attention rollout</h2>" in (tmp_path / "report.html").read_text()
    described = json.loads(answer.out)
    assert described["rollout"]["reads"] == "the mean of the 16 patches"
    assert [layer["grid"] for layer in described["distances"]] == [[4, 4], [4, 4]]


# ---- without the class -----------------------------------------------------------------------------------------------


def test_no_command_without_the_option_runs_the_file(own_bundle: OwnBundle, tmp_path: Path) -> None:
    path, before = own_bundle.bundle.path, own_bundle.runs()
    image = tmp_path / "image.png"
    image.write_bytes(own_bundle.bundle.golden_set().images[0])
    open_bundle(path)
    assert gmmvit_here("parity", path).status == 0
    assert gmmvit_here("classify", image, "--bundle", path).status == 0
    assert gmmvit_here("repository", path, "-o", tmp_path / "models").status == 0
    refused(gmmvit_here("parity", path, "--runner", "eager"), "runs a file only if --model names the file")
    refused(gmmvit_here("inspect", path / "weights.safetensors"), "runs a file only if --model names the file")
    refused(gmmvit_here("inspect", path, "--image", image), "runs a file only if --model names the file")
    refused(gmmvit_here("export", path / "weights.safetensors", "-o", tmp_path / "b", "--input", "tensor"), "runs a")
    refused(gmmvit_here("convert", path, "--precision", "fp16"), "runs a file only if --model names the file")
    refused(gmmvit_here("bench", path, "--synthetic"), "runs a file only if --model names the file")
    assert own_bundle.runs() == before


def test_parity_without_the_class_compares_with_the_stored_logits(own_bundle: OwnBundle) -> None:
    answer = gmmvit_here("parity", own_bundle.bundle.path, "--json")
    assert answer.status == 0, answer
    report = json.loads(answer.out)
    assert report["verdict"] == "passed"
    checks = {check["name"]: check for check in [*report["checks"], *report["runners"][0]["checks"]]}
    skipped = {name for name, check in checks.items() if check["verdict"] == "skipped"}
    of_images = {"decisions", "accuracy", "stages", "calibration"}
    assert skipped == {"constants", "reference", *of_images, "deferral", "neighbours", "served", "localize"}
    for name in ("constants", "reference", "decisions", "accuracy", "localize"):
        assert "only if --model names the file" in checks[name]["summary"]
    numbers, _ = checks["numeric"]["details"]["sets"]  # at batch 1, and the largest
    assert (numbers["inputs"], numbers["reference"]) == ("golden", "the logits that PyTorch computed at export")
    assert "from the logits that PyTorch computed at export" in checks["numeric"]["summary"]


@pytest.mark.parametrize("times", [3.0, float("nan")])
def test_stored_logits_find_a_wrong_runner(
    own_bundle: OwnBundle, times: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = OnnxRuntimeRunner._run
    monkeypatch.setattr(OnnxRuntimeRunner, "_run", lambda self, batch: run(self, batch) * times)
    answer = gmmvit_here("parity", own_bundle.bundle.path, "--runner", "onnxruntime", "--report", tmp_path / "a.html")
    assert answer.status == 1
    assert "FAILED: " in answer.out.splitlines()[-1]
    assert "numeric" in answer.out.splitlines()[-1]
    assert "the logits that PyTorch computed at export" in (tmp_path / "a.html").read_text()


def test_bench_without_the_class_expects_the_stored_logits(own_bundle: OwnBundle) -> None:
    bundle = own_bundle.bundle
    inputs, stored = stored_inputs(bundle, 20)
    expected = Expected(bundle, inputs)
    indices = np.array([0, 15, 19])
    assert np.array_equal(expected.exact[indices], stored[indices])
    assert bundle.manifest.float32_noise < expected.limit("fp32").largest < 1e-3
    refused(
        gmmvit_here("bench", bundle.path, "--runner", "onnxruntime", "--data", "digits"),
        "PyTorch's logits of these images are not known",
    )


# ---- the option ------------------------------------------------------------------------------------------------------


def test_another_file_is_refused_and_does_not_run(own_bundle: OwnBundle, tmp_path: Path) -> None:
    other, before = own_file(tmp_path, "# another line"), own_bundle.runs()
    answer = refused(gmmvit_here("parity", own_bundle.bundle.path, "--model", f"{other}:Net"), "differs from the file")
    spec = own_bundle.bundle.manifest.spec
    assert isinstance(spec, CustomSpec)
    assert spec.code_sha256 in answer
    assert with_code(tmp_path, "# another line").sha256 in answer
    assert not (tmp_path / "runs").exists()
    assert own_bundle.runs() == before


UNKNOWN_OPERATOR = """
class Bounded(Net):
    def forward(self, x):
        return super().forward(x.tanh())
"""


@pytest.mark.nightly
def test_an_operator_without_a_known_role_keeps_the_class_in_float32(tmp_path: Path) -> None:
    source = own_file(tmp_path, UNKNOWN_OPERATOR)
    save_weights(source, tmp_path / "net.pth", cls="Bounded", **ARGUMENTS)
    model = ("--model", f"{source}:Bounded")
    words = ("export", tmp_path / "net.pth", *model, "--model-args", json.dumps(ARGUMENTS), *IMAGE, "--input", "tensor")
    answer = gmmvit_here(*words, "-o", tmp_path / "b", "--precision", "fp16")
    lines = refused(answer, "fp16 needs a known role for each operator; node network/Tanh has none", "runs in fp32")
    assert "operators of this model without a known role: Tanh" in lines
    assert not (tmp_path / "b").exists()
    answer = gmmvit_here(*words, "-o", tmp_path / "b")
    assert answer.status == 0, answer
    answer = gmmvit_here("convert", tmp_path / "b", "--precision", "fp16", *model)
    refused(answer, "fp16 needs a known role for each operator")
    assert not (tmp_path / "b" / "graphs/fp16.onnx").exists()


def test_size_and_channels_are_asked_for_before_the_file_runs(own_bundle: OwnBundle, tmp_path: Path) -> None:
    before = own_bundle.runs()
    checkpoint = own_bundle.source.with_name("net.pth")
    answer = gmmvit_here("export", checkpoint, "-o", tmp_path / "b", "--model", own_bundle.model, "--input", "tensor")
    assert "type --image-size N and --set channels=N" in refused(answer, "the size and the channels of the images")
    answer = gmmvit_here("inspect", checkpoint, "--model", own_bundle.model, *IMAGE, "--set", "heads=2")
    refused(answer, "--set heads does not apply to the class Net")
    answer = gmmvit_here("inspect", checkpoint, "--model", own_bundle.model, *IMAGE, "--set", "pool=cls")
    assert "leave --set pool out" in refused(answer, "--set pool does not apply to the class Net")
    assert own_bundle.runs() == before


# ---- files that cannot be used ---------------------------------------------------------------------------------------

BAD_FILES = {
    "raises": ("raise RuntimeError('no luck')", "Net", "cannot be run: RuntimeError: no luck", ", line {first}"),
    "exits": ("raise SystemExit(3)", "Net", "the file cannot be run: SystemExit: 3", ", line {first}"),
    "no module": ("class Plain: pass", "Plain", "Plain is a class that is not derived from torch.nn.Module", ""),
    "forward": (
        "class Bad(Net):\n    def forward(self, x):\n        return self.nothing(x)",
        "Bad",
        "cannot compute the logits of images of 3 × 16 × 16: AttributeError",
        ", line {third}",
    ),
    "float64": (
        "class Bad(Net):\n    def forward(self, x):\n        return super().forward(x.float())",
        "Bad",
        "cannot compute float64 logits",
        ", line ",
    ),
    "classes": ("class Bad(Net):\n    def forward(self, x): return super().forward(x).argmax(1)", "Bad", "(2,)", ""),
    "softmax": (
        "class Bad(Net):\n    def forward(self, x): return super().forward(x).softmax(1)",
        "Bad",
        "got probabilities, because the class ends in a softmax",
        "",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_file_that_cannot_be_used(fault: str, own_bundle: OwnBundle, tmp_path: Path) -> None:
    code, name, message, where = BAD_FILES[fault]
    source = own_file(tmp_path, code)
    options = ("--model", f"{source}:{name}", "--model-args", json.dumps(ARGUMENTS), *IMAGE, "--input", "tensor")
    answer = gmmvit_here("export", own_bundle.source.with_name("net.pth"), "-o", tmp_path / "b", *options)
    lines = source.read_text(encoding="utf-8").splitlines()
    first = len(lines) - len(code.splitlines()) + 1  # the first line of the code
    refused(answer, message, where.format(first=first, third=first + 2), "mine.py")
    assert not (tmp_path / "b").exists()


# ---- tensors ---------------------------------------------------------------------------------------------------------


def hints(source: Path, name: str = "Net") -> LoadHints:
    return LoadHints(model=f"{source}:{name}", model_args=ARGUMENTS, image_size=16, channels=3)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_a_class_whose_tensors_all_begin_with_model(prefix: str, tmp_path: Path) -> None:
    wrapper = "class Outer(nn.Module):\n    def __init__(self, **args):\n        super().__init__()\n"
    wrapper += "        self.model = Net(**args)\n    def forward(self, x):\n        return self.model(x)\n"
    source = own_file(tmp_path, wrapper)
    network = save_weights(source, tmp_path / "net.pth", prefix=prefix, cls="Outer", **ARGUMENTS)
    loaded = load_checkpoint(tmp_path / "net.pth", hints(source, "Outer"))
    images = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(images), network(images))


# ---- attention -------------------------------------------------------------------------------------------------------

CALLS = {
    "own scale": ("qkv[0], qkv[1], qkv[2], scale=0.3", 2),
    "no weights dropped": ("qkv[0], qkv[1], qkv[2], dropout_p=0.5 if self.training else 0.0", 2),
    "a mask": ("qkv[0], qkv[1], qkv[2], attn_mask=torch.ones(N, N, dtype=torch.bool).tril()", 0),
    "the future masked": ("qkv[0], qkv[1], qkv[2], is_causal=True", 0),
}


@pytest.mark.parametrize("call", CALLS)
def test_attention_that_calls_the_fused_function(call: str, tmp_path: Path) -> None:
    arguments, answered = CALLS[call]
    source = own_file(tmp_path)
    code = source.read_text(encoding="utf-8")
    source.write_text(code.replace("attention(qkv[0], qkv[1], qkv[2])", f"attention({arguments})"), encoding="utf-8")
    assert arguments in source.read_text(encoding="utf-8")
    network = save_weights(source, tmp_path / "net.pth", **ARGUMENTS)
    model = load_checkpoint(tmp_path / "net.pth", hints(source)).model
    assert len(list(attention_scores(model))) == answered
    assert model.state_dict().keys() == {f"network.{name}" for name in network.state_dict()}
    images = torch.randn(3, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), network(images), rtol=0, atol=1e-5)


def test_a_module_that_calls_the_fused_function_twice_is_left_alone(tmp_path: Path) -> None:
    twice = "class Twice(Net):\n    def forward(self, x):\n        x = self.embed(x).flatten(2).transpose(1, 2)\n"
    twice += "        return self.head(self.blocks[0](self.blocks[0](x)).mean(1))\n"
    source = own_file(tmp_path, twice)
    network = save_weights(source, tmp_path / "net.pth", cls="Twice", **ARGUMENTS)
    model = load_checkpoint(tmp_path / "net.pth", hints(source, "Twice")).model
    assert not list(attention_scores(model))
    images = torch.randn(3, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), network(images), rtol=0, atol=0)


# ---- pooling ---------------------------------------------------------------------------------------------------------

POOLING = """
class Pooled(nn.Module):
    def __init__(self, pooled):
        super().__init__()
        self.first, self.pool = nn.Conv2d(3, 8, 2, 2), nn.AdaptiveAvgPool2d(pooled)
        self.last, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * pooled[0] * pooled[1] + 4, 5)

    def forward(self, x):
        tokens = nn.functional.adaptive_avg_pool2d(self.first(x).flatten(2), (1, 4)).flatten(1)
        return self.head(torch.cat([self.last(self.pool(self.first(x))).flatten(1), tokens], 1))
"""


@pytest.mark.parametrize(("size", "operator"), [((3, 9), "MatMul"), ((4, 2), "AveragePool")])
def test_adaptive_average_pooling_to_any_size(size: tuple[int, int], operator: str, tmp_path: Path) -> None:
    """The network pools 8 × 8 values, and the 8 × 64 values of an image.

    Export compares the logits of ONNX Runtime and OpenVINO with PyTorch's.
    """
    source = own_file(tmp_path, POOLING)
    save_weights(source, tmp_path / "net.pth", cls="Pooled", pooled=size)
    loading = LoadHints(model=f"{source}:Pooled", model_args={"pooled": size}, image_size=16, channels=3)
    options = cifar_options(labels=tuple("abcde"), resize="stretch-bilinear")
    bundle = bundle_from_checkpoint(tmp_path / "net.pth", tmp_path / "bundle", options, hints=loading)
    operators = {node.op_type for node in onnx.load(bundle.onnx_path).graph.node}
    assert operator in operators
    assert not operators & {"GatherND", "Where"}
    assert bundle.manifest.export_parity.keys() >= {"onnxruntime_largest_abs", "openvino_largest_abs"}
