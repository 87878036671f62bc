"""Every runner states what it runs and what it can do; no runner falls back to another."""

from __future__ import annotations

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.exporting.golden import fresh_inputs
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.runtimes.programs import openvino as runtime_module
from gmmvit_deploy.runtimes.runners.inspection import LOGITS
from gmmvit_deploy.runtimes.runners.open import default_runners, fastest_runner, open_runner
from tests.runtimes.kernels.test_masked_attention import needs_kernel


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_the_plain_runner_runs_the_file_as_it_lies_on_disk(name: str, bundle: Bundle) -> None:
    with open_runner(name, bundle) as runner:
        assert (runner.name, runner.label, runner.callers, runner.server) == (name, name, 1, None)
        assert "our own" not in runner.settings.get("attention", "")
        provenance = runner.provenance()
    assert provenance["graph"] == "model.onnx"
    assert provenance["graph SHA-256"] == sha256_of_file(bundle.onnx_path)
    assert "made from" not in provenance


@needs_kernel
def test_kernels_have_a_graph_with_a_hash_of_its_own(bundle: Bundle, precise_bundle: Bundle) -> None:
    hashes = []
    for opened in (bundle, precise_bundle):  # the same graph, opened twice
        with open_runner("openvino+kernels", opened) as runner:
            assert runner.settings["attention"] == "our own, f32"
            provenance = runner.provenance()
        assert provenance["graph"] == "model.onnx with our kernels"
        assert provenance["made from"] == "model.onnx"
        assert provenance["made from SHA-256"] == sha256_of_file(bundle.onnx_path)
        assert len(provenance["kernels SHA-256"]) == 64
        hashes.append(provenance["graph SHA-256"])
    assert hashes[0] == hashes[1] != sha256_of_file(bundle.onnx_path)


@needs_kernel
@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "openvino+kernels"])
def test_inner_values_are_those_of_the_graph_that_runs(name: str, bundle: Bundle) -> None:
    inputs = fresh_inputs(bundle, 5)
    with open_runner(name, bundle) as runner:
        graph, why_not = runner.inspectable()
        assert graph is not None
        assert why_not == ""
        last = [node.outputs[0].name for node in graph.model.graph if node.name.startswith("blocks.0/")][-1]
        values = graph.values(inputs, [last])
        np.testing.assert_allclose(values[LOGITS], runner.run(inputs), atol=1e-5)
        assert values[last].shape[0] == 5
        assert graph.values(inputs, []).keys() == {LOGITS}
    assert ("with our kernels" in graph.name) == name.endswith("+kernels")


def test_a_module_has_no_graph(bundle: Bundle) -> None:
    with open_runner("eager", bundle) as runner:
        assert runner.inspectable() == (None, "eager runs the trained module, not the bundle's graph")
        assert runner.provenance()["weights SHA-256"] == sha256_of_file(bundle.weights_path)
        assert runner.graph is None


def test_kernels_that_cannot_be_compiled_are_skipped_with_the_reason(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "openvino_library", lambda: (None, "no C++ compiler"))
    assert default_runners(bundle) == (["onnxruntime", "openvino"], ["openvino+kernels: no C++ compiler"])
    with pytest.raises(InputError, match=r"openvino\+kernels cannot run here: no C\+\+ compiler"):
        open_runner("openvino+kernels", bundle)


def test_the_fastest_runner_is_openvino_where_it_can_run(
    bundle: Bundle, precise_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fastest_runner(precise_bundle, "fp16")[0] == "onnxruntime"
    monkeypatch.setattr(runtime_module, "find_spec", lambda name: None)
    name, why = fastest_runner(bundle)
    assert name == "onnxruntime"
    assert "pip install 'gmmvit-deploy[openvino]'" in why
