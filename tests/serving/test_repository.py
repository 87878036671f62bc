from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from google.protobuf import text_format
from PIL import Image
from tritonclient.grpc import model_config_pb2

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.doctor import examine_bundle
from gmmvit_deploy.errors import EngineError, InputError, OutputError, RepositoryError
from gmmvit_deploy.inference import cores
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.engines.card import Engine, open_engine
from gmmvit_deploy.runtimes.engines.compatibility import server_tensorrt
from gmmvit_deploy.runtimes.programs.openvino import kernels_for_graph
from gmmvit_deploy.serving.installs import ServerInstall, find_server
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.repository_runner import options_for_server, resolved_options
from tests.choices import chosen_bundle
from tests.cli.terminal import gmmvit_here


def config(path: Path) -> model_config_pb2.ModelConfig:
    """Parsed by protobuf itself: an unknown field or value would raise."""
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def served_by_tensorrt(engine: Engine, folder: Path, **changes: object) -> Engine:
    """Return the engine with the flavor ``tensorrt`` in its card, since a real build for it needs a GPU."""
    shutil.copytree(engine.path, folder)
    data = json.loads((folder / "card.json").read_text())
    data.update(flavor="tensorrt", tensorrt_version="10.9.0.34", **changes)
    (folder / "card.json").write_text(json.dumps(data))
    return open_engine(folder)


SERVER = server_tensorrt(release="25.04")  # TensorRT 10.9
NOT_ON_A_CPU = "ONNX Runtime computes in fp32, fp16, int8 on a CPU, not in "


@pytest.mark.parametrize("backend", ["python", "onnxruntime", "tensorrt"])
def test_every_backend_gives_five_models(backend: str, engine: Engine, precise_bundle: Bundle, tmp_path: Path) -> None:
    plan = served_by_tensorrt(engine, tmp_path / "e") if backend == "tensorrt" else None
    options = RepositoryOptions(backend=backend, name="m")
    written = repository_from_bundle(precise_bundle, tmp_path / "r", options, engine=plan, server=SERVER)
    assert written.models == ("m", "m_classify", "m_network", "m_preprocess", "m_labels")
    network = config(tmp_path / "r" / "m_network" / "config.pbtxt")
    assert (network.backend, network.max_batch_size) == (backend, 8)
    assert network.HasField("dynamic_batching")
    assert [sample.batch_size for sample in network.model_warmup] == ([] if backend == "python" else [1, 8])
    ours = {"openvino_kernels.so"} if kernels_for_graph(precise_bundle.onnx_path, "fp32")[0] else set()
    expected = {
        "python": {"model.py", "model.onnx", "golden.npz", "gmmvit_inference", *ours},
        "onnxruntime": {"model.onnx", "golden.npz"},
        "tensorrt": {"model.plan", "golden.npz"},
    }
    assert {file.name for file in (tmp_path / "r" / "m_network" / "1").iterdir()} == expected[backend]
    gpu = model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert (network.instance_group[0].kind == gpu) == (backend == "tensorrt")
    runner = {"python": f"openvino{'+kernels' if ours else ''}", "tensorrt": "tensorrt:fp16"}.get(backend, backend)
    assert network.parameters["gmmvit_runner"].string_value == written.runner == runner


def test_kernels_that_must_be_there_and_cannot(tensor_bundles: dict[str, Bundle], tmp_path: Path) -> None:
    bundle = tensor_bundles["eanet_performer"]  # no Q Kᵀ
    options = RepositoryOptions(runner=RunnerName("openvino", kernels=True))
    with pytest.raises(InputError, match=r"runner openvino\+kernels cannot run on this machine: ") as caught:
        repository_from_bundle(bundle, tmp_path / "r", options)
    assert "type --runner openvino to run the same graph" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    assert "+kernels" not in repository_from_bundle(bundle, tmp_path / "r").runner


def test_the_runner_that_is_typed_decides(gmmvit, bundle: Bundle, tmp_path: Path) -> None:
    for words, runner in (
        (("--runner", "openvino:fp32"), "openvino"),
        (("--runner", "onnxruntime-cuda"), "onnxruntime-cuda"),
        (("--backend", "onnxruntime", "--runner", "onnxruntime:fp32"), "onnxruntime"),
    ):
        written = gmmvit("repository", bundle.path, "-o", tmp_path / "r", "--force", "--json", *words)
        assert json.loads(written.stdout)["runner"] == runner, written.stderr
    for arguments, message in (
        (("--runner", "onnxruntime+", "--json"), "runner 'onnxruntime+' is not known"),
        (("--runner", "openvino:fp4"), "'fp4' is not known"),
        (("--runner", "openvino:fp16"), "OpenVINO computes in fp32, bf16, int8 on a CPU, not in fp16"),
        (("--runner", "openvino", "--backend", "onnxruntime"), "--backend onnxruntime --runner onnxruntime:fp32"),
        (("--runner", "openvino", "--backend", "tensorrt"), "remove --runner, or remove --backend and --engine"),
    ):
        refused = gmmvit("repository", bundle.path, "-o", tmp_path / "refused", *arguments)
        assert refused.returncode == 1
        assert message in refused.stderr
    assert not (tmp_path / "refused").exists()


def test_an_engine_is_served_with_its_profiles(engine: Engine, precise_bundle: Bundle, tmp_path: Path) -> None:
    plan = served_by_tensorrt(engine, tmp_path / "e", profiles=["1:1:1", "2:3:4"])
    options = RepositoryOptions(backend="tensorrt")
    repository_from_bundle(precise_bundle, tmp_path / "r", options, engine=plan, server=SERVER)
    network = config(tmp_path / "r" / "gmmvit_network" / "config.pbtxt")
    assert list(network.instance_group[0].profile) == ["0", "1"]
    assert network.max_batch_size == 4
    assert network.parameters["gmmvit_plan_sha256"].string_value == engine.card.sha256["plan"]
    assert (tmp_path / "r" / "gmmvit_network" / "1" / "model.plan").read_bytes() == engine.plan_path.read_bytes()


def test_engines_that_the_server_would_not_load(engine: Engine, precise_bundle: Bundle, tmp_path: Path) -> None:
    options = RepositoryOptions(backend="tensorrt")
    plan = served_by_tensorrt(engine, tmp_path / "e")
    for given, server, message in (
        (
            plan,
            server_tensorrt(release="24.12"),
            "expected the same version to load the plan, got 10.7.0 on Triton 24.12; build the engine again",
        ),
        (plan, None, "the server's TensorRT version is not known"),
        (engine, SERVER, "Triton's tensorrt backend loads only plans of tensorrt"),
        (served_by_tensorrt(engine, tmp_path / "f", profiles=["4:8:8"]), SERVER, "no profile for a batch of 1"),
    ):
        with pytest.raises(InputError, match=message):
            repository_from_bundle(precise_bundle, tmp_path / "r", options, engine=given, server=server)
        assert not (tmp_path / "r").exists()
    other = replace(precise_bundle, path=tmp_path / "other")
    shutil.copytree(precise_bundle.path, other.path)
    (other.path / "manifest.json").write_text((other.path / "manifest.json").read_text() + "\n")
    with pytest.raises(EngineError, match="got an engine built from bundle"):
        repository_from_bundle(other, tmp_path / "r", options, engine=plan, server=SERVER)


@pytest.mark.parametrize(("asked", "stated"), [(0, 3), (5, 5)])
def test_the_servers_onnxruntime_gets_a_thread_for_each_allowed_core(
    asked: int, stated: int, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number, ONNX Runtime counts the machine, and binds threads to cores outside the affinity."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1, 4, 9})
    monkeypatch.setattr(cores, "cpu_quota", lambda root: None)
    repository_from_bundle(bundle, tmp_path / "r", RepositoryOptions(backend="onnxruntime", threads=asked))
    network = config(tmp_path / "r" / "gmmvit_network" / "config.pbtxt")
    assert network.parameters["intra_op_thread_count"].string_value == str(stated)


def test_the_doctor_states_the_oldest_server_that_reads_a_graph(precise_bundle: Bundle) -> None:
    """Release 24.05 has ONNX Runtime 1.18, which reads IR version 10 and opset 21."""
    checks = {check.name: check.detail for check in examine_bundle(precise_bundle, None)}
    oldest = "the ONNX Runtime backend of Triton 24.05 or newer loads it, with --runner onnxruntime-cuda 24.06 or newer"
    for name in ("model.onnx", "graphs/fp16.onnx", "graphs/int8.onnx"):
        graph = onnx.load(precise_bundle.path / name)
        assert (graph.ir_version, graph.opset_import[0].version) <= (10, 21)
        assert oldest in checks[name]
    assert oldest not in checks["graphs/bf16.onnx"]


@pytest.mark.parametrize(
    ("runtime", "parameters"), [("cuda", {"use_tf32": "0"}), ("tensorrt", {"precision_mode": "FP16"})]
)
def test_the_servers_onnxruntime_may_run_on_a_gpu(
    runtime: str, parameters: dict[str, str], precise_bundle: Bundle, tmp_path: Path
) -> None:
    """The provider of TensorRT builds an engine from the same graph when the model is loaded."""
    options = RepositoryOptions(backend="onnxruntime", runner=RunnerName(f"onnxruntime-{runtime}", "fp16"), instances=2)
    repository_from_bundle(precise_bundle, tmp_path / "r", options)
    network = config(tmp_path / "r" / "gmmvit_network" / "config.pbtxt")
    assert network.backend == "onnxruntime"
    (accelerator,) = network.optimization.execution_accelerators.gpu_execution_accelerator
    assert (accelerator.name, dict(accelerator.parameters)) == (runtime, parameters)
    (group,) = network.instance_group
    assert (group.count, group.kind) == (2, model_config_pb2.ModelInstanceGroup.KIND_GPU)
    preprocess = config(tmp_path / "r" / "gmmvit_preprocess" / "config.pbtxt")
    assert preprocess.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    copied = tmp_path / "r" / "gmmvit_network" / "1" / "model.onnx"
    assert copied.read_bytes() == (precise_bundle.path / "graphs/fp16.onnx").read_bytes()


def test_without_normalisation_there_is_only_the_network(tensor_bundles: dict[str, Bundle], tmp_path: Path) -> None:
    written = repository_from_bundle(tensor_bundles["vit_gmm"], tmp_path / "r")
    assert written.models == ("gmmvit_network",)
    assert "the bundle has no mean and std" in written.skipped[0]
    assert [folder.name for folder in (tmp_path / "r").iterdir()] == ["gmmvit_network"]


def test_a_refusal_names_what_to_type_and_leaves_no_folder(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="needs an engine") as caught:
        repository_from_bundle(bundle, tmp_path / "r", RepositoryOptions(backend="tensorrt"))
    assert f"gmmvit build {bundle.path} --flavor tensorrt" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "r").mkdir()
    with pytest.raises(OutputError, match="exists"):
        repository_from_bundle(bundle, tmp_path / "r")
    assert list((tmp_path / "r").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "pytorch"}, "backend: expected one of onnxruntime, python, tensorrt, got 'pytorch'"),
        *(({"name": name}, "model name: expected only letters, digits, - and _") for name in ("a b", "../x", "")),
        ({"instances": 0}, "instances: expected at least 1, got 0"),
        ({"threads": -1}, "threads: expected at least 0, got -1"),
        ({"preprocess_threads": -1}, "preprocess_threads: expected at least 0, got -1"),
        ({"runner": "onnxruntime-cuda"}, "needs --backend onnxruntime, got --backend python"),
        ({"backend": "tensorrt", "runner": "onnxruntime:fp16"}, "the engine of --engine, built in a fixed precision"),
        ({"runner": "eager"}, "runner: expected one of openvino.kernels, openvino, .*, got 'eager'"),
        ({"runner": "onnxruntime:fp8"}, NOT_ON_A_CPU),
        ({"runner": "onnxruntime:bf16"}, NOT_ON_A_CPU),
        ({"runner": "onnxruntime:bf16", "backend": "onnxruntime"}, NOT_ON_A_CPU),
        ({"runner": "onnxruntime:int8", "backend": "onnxruntime"}, "multiplies int8 in float32, so int8 is slower"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options: dict[str, object], message: str) -> None:
    runner = {"runner": RunnerName.parse(str(options["runner"]))} if "runner" in options else {}
    with pytest.raises(InputError, match=message):
        RepositoryOptions(**options | runner)  # type: ignore[arg-type]


def files_below(folder: Path) -> set[Path]:
    """Return the relative paths of the files, also of those below links to folders."""
    walked = os.walk(folder, followlinks=True)
    files = {Path(parent, name).relative_to(folder) for parent, _, names in walked for name in names}
    return {file for file in files if file.suffix != ".pyc"}


def test_the_committed_repository_is_what_we_write(tmp_path: Path, bundle: Bundle) -> None:
    """``model_repository/`` shows the demo's models; only hashes, sizes and weights may differ."""
    committed = Path(__file__).parents[2] / "model_repository"
    repository_from_bundle(bundle, tmp_path / "r")
    written, there = files_below(tmp_path / "r"), files_below(committed)
    # Weights, and what is compiled for a machine.
    assert there - {Path("README.md")} == {path for path in written if path.suffix not in (".onnx", ".npz", ".so")}
    for relative in sorted(there - {Path("README.md")}):
        if relative.suffix == ".py":
            assert (committed / relative).read_text() == (tmp_path / "r" / relative).read_text(), relative
        if relative.name == "config.pbtxt":
            ours, theirs = config(tmp_path / "r" / relative), config(committed / relative)
            assert set(ours.parameters) == set(theirs.parameters), relative
            for model in (ours, theirs):
                model.max_batch_size = 0
                model.parameters.clear()
                for sample in model.model_warmup:
                    sample.batch_size, sample.name = 0, ""
            assert ours == theirs, relative


# ---- the runner that was chosen on this machine ----------------------------------------------------------------------


def test_a_repository_states_the_choice_unless_a_runner_is_typed(precise_bundle: Bundle, tmp_path: Path) -> None:
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16")
    for words, runner in (((), "onnxruntime:fp16"), (("--runner", "openvino:bf16"), "openvino:bf16")):
        answer = gmmvit_here("repository", bundle.path, "-o", tmp_path / "r", "--force", "--json", *words)
        assert json.loads(answer.out)["runner"] == runner
        configs = list((tmp_path / "r").glob("*/config.pbtxt"))
        assert configs
        assert all(f'string_value: "{runner}"' in config.read_text() for config in configs)


@pytest.mark.nightly
def test_every_command_that_takes_the_choice_says_that_it_was_judged_with_other_versions(
    precise_bundle: Bundle, tmp_path: Path
) -> None:
    """`serve` prints the notes of `options_for_server`, and `tune` those of `resolved_options`."""
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16", versions={"onnxruntime": "1.0.0"})
    photo = tmp_path / "photos" / "photo.png"
    photo.parent.mkdir()
    Image.new("RGB", (32, 32)).save(photo)
    said = "onnxruntime:fp16 was judged with other versions: onnxruntime 1.0.0 → "
    quick = ("--batch", "1", "--samples", "1", "--rounds", "3", "--seconds", "0.01")
    commands: list[tuple[str | Path, ...]] = [
        ("repository", bundle.path, "-o", tmp_path / "r"),
        ("pack", bundle.path, "-o", tmp_path / "p"),
        ("classify", photo, "--bundle", bundle.path),
        ("classify", "--bundle", bundle.path, "--from", photo.parent, "--to", tmp_path / "to", "--workers", "1"),
        ("bench", bundle.path, "--synthetic", "--no-roofline", *quick),
    ]
    for words in commands:
        answer = gmmvit_here(*words)
        assert said in " ".join(answer.err.split()), words
    for _, notes in (
        options_for_server(bundle, RepositoryOptions(), find_server(), None),
        resolved_options(bundle, RepositoryOptions()),
    ):
        assert any(said in note for note in notes)


def test_a_server_runs_what_its_own_backend_can_run_there(precise_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
    install = ServerInstall(kind="system", binary=tmp_path / "tritonserver", backends=tmp_path / "backends")
    bundle = chosen_bundle(precise_bundle, tmp_path / "b", "onnxruntime:fp16")
    for served, server, typed, expected in (
        (bundle, install, None, ("onnxruntime", "onnxruntime:fp16")),
        (precise_bundle, install, None, ("onnxruntime", "onnxruntime")),
        (bundle, install, "openvino:bf16", ("python", "openvino:bf16")),
        (bundle, install, "onnxruntime-cuda:fp16", ("onnxruntime", "onnxruntime-cuda:fp16")),
        (bundle, find_server(), None, ("python", "onnxruntime:fp16")),
    ):
        options, _ = options_for_server(served, RepositoryOptions(), server, typed)
        assert (options.backend, str(options.runner)) == expected
