"""Written manifests: valid for Kubernetes' schemas, and built by kustomize."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.kubernetes.options import ManifestOptions, location
from gmmvit_deploy.kubernetes.pack import BUNDLE_LABEL, pack
from gmmvit_deploy.kubernetes.write import manifests_from_bundle
from gmmvit_deploy.runtimes.engines.releases import NEWEST
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import Repository, add_to_repository, repository_from_bundle
from tests.documented import PAGES
from tests.kubernetes.made import IMAGE, OCI, hadolint, object_in, objects_in, tuning_file, validate, write

OPTIONS = ManifestOptions(style="deployment", image=IMAGE, model=location(OCI, "--model-uri", oci=True))


@pytest.mark.first(1)
@pytest.mark.parametrize("model", [OCI, "pvc://models/vit/3", "s3://bucket/models/vit"])
def test_objects_are_valid_and_complete(bundle: Bundle, tmp_path: Path, model: str) -> None:
    written = write(bundle, tmp_path / "out", model=model)
    copied = f"copy the files in the folder that gmmvit repository {bundle.path} writes to {model}"
    assert written.warnings == (() if model == OCI else (copied,))
    assert {f"{item['kind']}/{item['metadata']['name']}" for item in objects_in(written.apply)} == {
        *("Deployment/gmmvit", "Service/gmmvit", "Service/gmmvit-metrics", "PodDisruptionBudget/gmmvit"),
        *("NetworkPolicy/gmmvit", "HorizontalPodAutoscaler/gmmvit", "ServiceMonitor/gmmvit", "PrometheusRule/gmmvit"),
    }
    validate(written.apply)


def test_the_objects_beside_those_of_kserve_are_valid_and_fit_its_pods(bundle: Bundle, tmp_path: Path) -> None:
    written = write(bundle, tmp_path / "out", style="kserve", clients="istio-system")
    validate(written.apply)
    labels = object_in(written, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert labels == {"serving.kserve.io/inferenceservice": "gmmvit"}


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on PATH, whose kustomize builds the folders")
@pytest.mark.parametrize("style", ["deployment", "kserve"])
@pytest.mark.parametrize("tuned", [True, False])
def test_kustomize_builds_the_objects(bundle: Bundle, tmp_path: Path, style: str, tuned: bool) -> None:
    written = write(bundle, tmp_path / "out", style=style, tuned=tuned)
    done = subprocess.run(["kubectl", "kustomize", written.apply], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    kinds = sorted(item["kind"] for item in yaml.safe_load_all(done.stdout))
    assert kinds == sorted(item["kind"] for item in objects_in(tmp_path / "out" / "base"))
    assert ("FILL_IN" in done.stdout) is not tuned


@pytest.mark.parametrize("style", ["deployment", "kserve"])
def test_without_a_measurement_every_size_must_be_filled_in(bundle: Bundle, tmp_path: Path, style: str) -> None:
    written = write(bundle, tmp_path / "out", style=style, tuned=False)
    assert written.apply == tmp_path / "out" / "overlays" / "fill-in"
    # cpu and memory, requested and limited; instances, threads
    assert (written.apply / "sizes.yaml").read_text().count(": FILL_IN") == 6


@pytest.mark.parametrize(
    ("options", "images", "gpus"),
    [
        ({"runner": RunnerName("onnxruntime")}, ("nvidia", "cpu"), None),
        ({"backend": "onnxruntime"}, ("nvidia",), None),
        ({"backend": "onnxruntime", "runner": RunnerName("onnxruntime-cuda")}, ("nvidia",), "1"),
    ],
    ids=["python", "onnxruntime", "cuda"],
)
def test_a_repository_decides_the_image_of_its_server_and_the_gpus(
    bundle: Bundle, tmp_path: Path, options: dict[str, Any], images: tuple[str, ...], gpus: str | None
) -> None:
    models = repository_from_bundle(bundle, tmp_path / "models", RepositoryOptions(**options))
    written = manifests_from_bundle(models.path, tmp_path / "out", OPTIONS)
    assert [*written.images] == [f"docker/{image}/Dockerfile" for image in images]
    for image in images:
        packages = (tmp_path / "out" / "docker" / image / "requirements.txt").read_text()
        assert ("nvidia-pytriton" in packages, "onnxruntime" in packages) == (image == "cpu", "cpu" in images)
    pod = yaml.safe_load((written.apply / "sizes.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [amounts.get("nvidia.com/gpu") for amounts in container["resources"].values()] == [gpus, gpus]


def test_the_images_of_several_models_have_the_packages_of_all(
    bundle: Bundle, features_bundle: Bundle, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    for name, each, runtime in (("cats", bundle, "onnxruntime"), ("search", features_bundle, "openvino")):
        add_to_repository(each, tmp_path / "models", RepositoryOptions(name=name, runner=RunnerName(runtime)))
    written = manifests_from_bundle(tmp_path / "models", tmp_path / "out", OPTIONS)
    stated = [f"cats={bundle.sha256}", f"search={features_bundle.sha256}"]
    (deployment,) = (item for item in objects_in(tmp_path / "out" / "base") if item["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    assert template["metadata"]["annotations"]["gmmvit/bundle-sha256"] == ", ".join(stated)
    for image in written.images:
        packages = (tmp_path / "out" / image).with_name("requirements.txt").read_text()
        assert all(f"{runtime}==" in packages for runtime in ("onnxruntime", "openvino"))
    validate(tmp_path / "out" / "base")
    file = tuning_file(bundle, tmp_path / "tuned.json")
    with pytest.raises(InputError, match="--tuned is of one bundle, but the repository has the networks cats, search"):
        manifests_from_bundle(tmp_path / "models", tmp_path / "other", OPTIONS, tuned=file)
    assert pack(tmp_path / "models", tmp_path / "image").labels[BUNDLE_LABEL] == ", ".join(stated)


def test_the_images_say_which_triton_they_start(bundle: Bundle, tmp_path: Path) -> None:
    written = write(bundle, tmp_path / "out")
    newest, wheel = written.images.values()
    assert f"(release {NEWEST}) has no fault that NVIDIA published" in newest
    assert f"ARG RELEASE={NEWEST}\n" in (tmp_path / "out" / "docker" / "nvidia" / "Dockerfile").read_text()
    assert "Triton 2.51.0 (release 24.10) has published faults" in wheel
    assert f"# Its server, {wheel}." in (tmp_path / "out" / "docker" / "cpu" / "Dockerfile").read_text()


def test_the_page_states_which_pods_the_network_policy_admits(bundle: Bundle, tmp_path: Path) -> None:
    policy = object_in(write(bundle, tmp_path / "out"), "NetworkPolicy")
    ((label, value),) = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items()
    assert f"kubectl label pod POD {label}={value}" in (PAGES / "kubernetes.md").read_text(encoding="utf-8")


def test_every_value_remains_the_string_that_it_is(bundle: Bundle, tmp_path: Path) -> None:
    """YAML reads a bare ``on`` as true."""
    image = 'x: "y" # é'
    written = write(bundle, tmp_path / "out", name="on", clients="null", image=image)
    deployment, policy = object_in(written, "Deployment"), object_in(written, "NetworkPolicy")
    assert (deployment["metadata"]["name"], policy["metadata"]["name"]) == ("on", "on")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == image
    selector = policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"]
    assert selector == {"matchLabels": {"kubernetes.io/metadata.name": "null"}}


def test_a_pod_has_no_rights_that_it_does_not_need(bundle: Bundle, tmp_path: Path) -> None:
    pod = object_in(write(bundle, tmp_path / "out"), "Deployment")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_objects_name_each_other_and_the_bundle(bundle: Bundle, tmp_path: Path) -> None:
    written = write(bundle, tmp_path / "out", model="s3://bucket/models/vit")
    objects = {item["kind"]: item for item in objects_in(written.apply)}
    deployment = objects["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    selectors = [deployment["spec"]["selector"]["matchLabels"], objects["Service"]["spec"]["selector"]]
    selectors += [objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]]
    selectors += [objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    assert all(selector and selector.items() <= labels for selector in selectors)
    assert objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    text = json.dumps(objects)
    assert text.count(bundle.sha256) == 1  # annotation
    assert set(re.findall(r'"gmmvit-(?:keys|tls|metrics-key|store)"', text)) == {
        f'"{name}"' for name in written.secrets
    }


def test_sizes_agree_with_the_measurement(bundle: Bundle, tmp_path: Path) -> None:
    written = write(bundle, tmp_path / "out")
    sizes = written.sizes
    assert sizes is not None
    assert (sizes.instances, sizes.threads, sizes.cpu) == ("2", "3", "7")
    assert sizes.in_flight == 20  # 400/s · 50 ms
    assert sizes.shm_mib == 256  # 3 · 20 · 4 MiB, in steps of 64 MiB
    assert sizes.memory == "1152Mi"  # 1.25 · 500 MiB + 256 MiB + 256 MiB, in steps of 64 MiB
    pod = object_in(written, "Deployment")["spec"]["template"]["spec"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}} in pod["volumes"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "7", "memory": "1152Mi"}
    assert "--in-flight 20 --queue-timeout 50" in " ".join(container["args"])


def test_a_measurement_of_another_bundle_or_that_is_incomplete_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    file = tuning_file(bundle, tmp_path / "tuned.json", sha256="0" * 64)
    with pytest.raises(InputError, match="measured with the bundle 0000000000000000"):
        write(bundle, tmp_path / "out", tuned=file)
    for missing in ("peak_bytes", "best", "machine"):
        data = json.loads(tuning_file(bundle, file).read_text())
        del data[missing]
        file.write_text(json.dumps(data))
        with pytest.raises(InputError, match=missing):
            write(bundle, tmp_path / "out", tuned=file)
    assert not (tmp_path / "out").exists()


def test_a_repository_with_other_settings_than_the_measurement_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    """The repository was written without threads: in a pod, each instance would take a thread for each core."""
    file = tuning_file(bundle, tmp_path / "tuned.json")
    unstated = repository_from_bundle(
        bundle, tmp_path / "unstated", RepositoryOptions(runner=RunnerName("onnxruntime"))
    )
    with pytest.raises(InputError, match=r"1 instances with 0 threads .* --tuned states 2 with 3"):
        manifests_from_bundle(unstated.path, tmp_path / "out", OPTIONS, tuned=file)
    for runtime in ("onnxruntime", "openvino"):
        options = RepositoryOptions(instances=2, threads=3, runner=RunnerName(runtime))
        repository_from_bundle(bundle, tmp_path / runtime, options)
    assert manifests_from_bundle(tmp_path / "onnxruntime", tmp_path / "out", OPTIONS, tuned=file).complete
    with pytest.raises(InputError, match="runs in openvino, but --tuned states onnxruntime"):
        manifests_from_bundle(tmp_path / "openvino", tmp_path / "other", OPTIONS, tuned=file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gs://bucket"}, "expected oci://"),
        ({"model": "pvc://claim/../x"}, "a path without .."),
        ({"model": "pvc://Claim_A/x"}, "a name of a claim"),
        ({"model": "s3://bucket/x", "fetch_image": ""}, "needs --fetch-image"),
        ({"name": "Big_Name"}, "--object-name: expected lower-case"),
        ({"min_pods": 1}, "2 pods at least"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_options_are_refused(bundle: Bundle, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        write(bundle, tmp_path / "out", **changes)


@pytest.mark.integration
def test_the_command(bundle: Bundle, tmp_path: Path, gmmvit: Any) -> None:
    out = tmp_path / "kubernetes"
    answer = gmmvit("manifests", bundle.path, "-o", out, "--image", "host:5000/server:1", "--model-uri", OCI)
    assert answer.returncode == 0, answer.stderr
    assert "create the Secret gmmvit-keys" in answer.stderr
    assert "--image host:5000/server:1: a tag can change" in answer.stderr
    assert answer.stdout.strip() == str(out / "overlays" / "fill-in")
    whole = gmmvit("manifests", bundle.path, "-o", out, "--force", "--image", IMAGE, "--model-uri", OCI, "--tuned",
                   tuning_file(bundle, tmp_path / "tuned.json"))  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    assert "a tag can change" not in whole.stderr


# ---- the build context of a model's image ----------------------------------------------------------------------------


def hashes(folder: Path) -> dict[Path, str]:
    return {path.relative_to(folder): sha256_of_file(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.integration
def test_a_repository_and_its_labels(repository: Repository, bundle: Bundle, tmp_path: Path) -> None:
    context = pack(repository.path, tmp_path / "image")
    assert {path.name for path in context.path.iterdir()} == {"Dockerfile", "models"}
    assert hashes(context.path / "models") == hashes(repository.path)
    text = (context.path / "Dockerfile").read_text()
    assert text.startswith(f'FROM scratch\nLABEL {BUNDLE_LABEL}="{bundle.sha256}"')
    assert text.endswith("\nCOPY models /models\n")
    assert hadolint(context.path / "Dockerfile") == ""


def test_a_bundle_becomes_a_repository_with_the_tuned_settings(bundle: Bundle, tmp_path: Path) -> None:
    file = tuning_file(bundle, tmp_path / "tuned.json", instances=2, threads=0, cores=8)
    text = (pack(bundle.path, tmp_path / "image", tuned=file).path / "models/gmmvit_network/config.pbtxt").read_text()
    assert 'key: "threads"' in text
    assert "count: 2" in text
    assert 'string_value: "4"' in text  # a thread for each core of the measurement, shared by two instances
    assert "max_queue_delay_microseconds: 500" in text


def test_a_bundle_as_it_is_with_files_that_every_user_can_read(bundle: Bundle, tmp_path: Path) -> None:
    private = tmp_path / "private"
    shutil.copytree(bundle.path, private)
    for path in (private, *private.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    context = pack(private, tmp_path / "image", contents="bundle")
    models = context.path / "models"
    assert context.labels["gmmvit.contents"] == "bundle"
    assert hashes(models) == hashes(bundle.path)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (models, *models.rglob("*"))}
    assert modes == {(True, 0o755), (False, 0o644)}


@pytest.mark.integration
def test_threads_that_are_not_stated_are_noted(bundle: Bundle, tmp_path: Path, gmmvit: Any) -> None:
    """Also the labels state instances and threads, which an operator writes into the manifests."""
    untuned = gmmvit("pack", bundle.path, "-o", tmp_path / "untuned")
    assert (untuned.returncode, "threads are not stated" in untuned.stderr) == (0, True), untuned.stderr
    file = tuning_file(bundle, tmp_path / "tuned.json")
    tuned = gmmvit("pack", bundle.path, "-o", tmp_path / "tuned", "--tuned", file)
    assert (tuned.returncode, "threads are not stated" in tuned.stderr) == (0, False), tuned.stderr
    for name, (instances, threads) in (("untuned", (1, 0)), ("tuned", (2, 3))):
        text = (tmp_path / name / "Dockerfile").read_text()
        assert f'gmmvit.instances="{instances}"' in text
        assert f'gmmvit.threads="{threads}"' in text


def test_what_cannot_be_packed_is_refused(repository: Repository, bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--contents bundle needs a bundle"):
        pack(repository.path, tmp_path / "image", contents="bundle")
    file = tuning_file(bundle, tmp_path / "tuned.json", sha256="0" * 64)
    with pytest.raises(InputError, match="measured with the bundle 0000000000000000"):
        pack(bundle.path, tmp_path / "image", tuned=file)
    assert not (tmp_path / "image").exists()


# ---- the models of the package kserve --------------------------------------------------------------------------------


PYTHON = os.environ.get("GMMVIT_KSERVE_PYTHON")
FILES = ("servingruntime.yaml", "inferenceservice.yaml")


@pytest.mark.integration
@pytest.mark.skipif(PYTHON is None, reason="GMMVIT_KSERVE_PYTHON names no Python with the package kserve")
@pytest.mark.parametrize("model", [OCI, "pvc://models/vit", "s3://bucket/vit"])
def test_nothing_is_lost_or_unknown(bundle: Bundle, tmp_path: Path, model: str) -> None:
    written = write(bundle, tmp_path / "out", style="kserve", model=model)
    script = Path(__file__).with_name("kserve_models.py")
    command = [str(PYTHON), script, *(written.apply / name for name in FILES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ours = [yaml.safe_load((written.apply / name).read_text()) for name in FILES]
    runtime, service = json.loads(done.stdout.splitlines()[-1])
    assert service["spec"]["predictor"]["model"].pop("name") == ""  # the model itself adds its default
    assert [runtime, service] == ours
