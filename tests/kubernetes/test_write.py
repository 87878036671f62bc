"""Written manifests: valid for Kubernetes' schemas, and built by kustomize."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.kubernetes.options import ManifestOptions, model_uri, tag_warnings
from gmmvit_deploy.kubernetes.timing import GRACE_S
from gmmvit_deploy.kubernetes.write import manifests_from_bundle
from gmmvit_deploy.serving.model_configs import RepositoryOptions
from gmmvit_deploy.serving.repository import Repository, repository_from_bundle
from tests.kubernetes.made import DIGEST, IMAGE, OCI, objects_in, tuning_file, write

MODELS = [OCI, "pvc://models/vit/3", "s3://bucket/models/vit"]
KUBERNETES = ("1.33", "1.35")
"""The releases of Kubernetes whose schemas the objects are held to."""


def names(path: Path) -> set[str]:
    return {f"{item['kind']}/{item['metadata']['name']}" for item in objects_in(path)}


@pytest.mark.first(1)
@pytest.mark.parametrize("model", MODELS)
def test_core_objects_are_valid_and_complete(bundle: Bundle, tmp_path: Path, model: str) -> None:
    written = write(bundle, tmp_path / "out", model=model)
    assert names(written.apply) == {
        *("Deployment/gmmvit", "Service/gmmvit", "Service/gmmvit-metrics", "PodDisruptionBudget/gmmvit"),
        *("NetworkPolicy/gmmvit", "HorizontalPodAutoscaler/gmmvit", "ServiceMonitor/gmmvit", "PrometheusRule/gmmvit"),
    }
    validate(written.apply)


def validate(folder: Path) -> None:
    """Hold the objects of Kubernetes itself to its schemas, without unknown fields."""
    foreign = ("kustomization", "servicemonitor", "prometheusrule", "servingruntime", "inferenceservice")
    files = [str(path) for path in sorted(folder.glob("*.yaml")) if path.stem not in foreign]
    for release in KUBERNETES:
        program = Path(sys.executable).with_name("kubernetes-validate")
        command = [program, "--strict", "--kubernetes-version", release, *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
def test_the_validator_refuses_a_misspelt_field(bundle: Bundle, tmp_path: Path) -> None:
    written = write(bundle, tmp_path / "out")
    file = written.apply / "deployment.yaml"
    file.write_text(file.read_text().replace("terminationGracePeriodSeconds", "terminationGraceSeconds"))
    with pytest.raises(AssertionError, match="terminationGraceSeconds"):
        validate(written.apply)


@pytest.mark.first(1)
@pytest.mark.process
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


def test_a_pod_has_no_rights_that_it_does_not_need(bundle: Bundle, tmp_path: Path) -> None:
    (deployment,) = (item for item in objects_in(write(bundle, tmp_path / "out").apply) if item["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_objects_name_each_other(bundle: Bundle, tmp_path: Path) -> None:
    objects = {item["kind"]: item for item in objects_in(write(bundle, tmp_path / "out").apply)}
    deployment = objects["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    selectors = [deployment["spec"]["selector"]["matchLabels"], objects["Service"]["spec"]["selector"]]
    selectors += [objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]]
    selectors += [objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    assert all(selector and selector.items() <= labels for selector in selectors)
    assert objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == GRACE_S


def test_sizes_agree_with_the_measurement(bundle: Bundle, tmp_path: Path) -> None:
    written = write(bundle, tmp_path / "out")
    sizes = written.sizes
    assert sizes is not None
    assert (sizes.instances, sizes.threads, sizes.cpu) == ("2", "3", "7")
    assert sizes.in_flight == 20  # 400/s · 50 ms
    assert sizes.shm_mib == 256  # 3 · 20 · 4 MiB, in steps of 64 MiB
    assert sizes.memory == "1152Mi"  # 1.25 · 500 MiB + 256 MiB + 256 MiB, in steps of 64 MiB
    deployment = next(item for item in objects_in(written.apply) if item["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    memory = {"medium": "Memory", "sizeLimit": "256Mi"}
    assert {"name": "shared-memory", "emptyDir": memory} in deployment["spec"]["template"]["spec"]["volumes"]
    assert container["resources"]["limits"] == {"cpu": "7", "memory": "1152Mi"}
    assert "--in-flight 20 --queue-timeout 50" in " ".join(container["args"])


def test_a_thread_for_each_core_counts_the_cores_of_the_measurement(bundle: Bundle, tmp_path: Path) -> None:
    file = tuning_file(bundle, tmp_path / "tuned.json", threads=0, instances=2, cores=8)
    written = write(bundle, tmp_path / "out", tuned=file)
    assert written.sizes is not None
    assert (written.sizes.threads, written.sizes.cpu) == ("4", "9")


def test_a_measurement_of_another_bundle_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    file = tuning_file(bundle, tmp_path / "tuned.json", sha256="0" * 64)
    with pytest.raises(InputError, match="measured with the bundle 0000000000000000"):
        write(bundle, tmp_path / "out", tuned=file)
    assert not (tmp_path / "out").exists()


def test_a_repository_with_other_threads_than_the_measurement_is_refused(
    repository: Repository, bundle: Bundle, tmp_path: Path
) -> None:
    """The repository was written without threads: in a pod, each instance would take a thread for each core."""
    options = ManifestOptions(style="deployment", image=IMAGE, model=model_uri(OCI))
    file = tuning_file(bundle, tmp_path / "tuned.json")
    with pytest.raises(InputError, match=r"1 instances with 0 threads .* --tuned states 2 with 3"):
        manifests_from_bundle(repository.path, tmp_path / "out", options, tuned=file)
    same = repository_from_bundle(bundle, tmp_path / "models", RepositoryOptions(instances=2, threads=3))
    assert manifests_from_bundle(same.path, tmp_path / "out", options, tuned=file).complete


@pytest.mark.parametrize("missing", ["peak_bytes", "best", "machine"])
def test_an_incomplete_measurement_is_refused(bundle: Bundle, tmp_path: Path, missing: str) -> None:
    file = tuning_file(bundle, tmp_path / "tuned.json")
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != missing}))
    with pytest.raises(InputError, match=missing):
        write(bundle, tmp_path / "out", tuned=file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gs://bucket"}, "expected oci://"),
        ({"model": "s3://bucket/x", "fetch_image": ""}, "needs --fetch-image"),
        ({"name": "Big_Name"}, "--object-name: expected lower-case"),
        ({"least": 1}, "2 pods at least"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_options_are_refused(changes: dict[str, Any], message: str) -> None:
    model = changes.pop("model", OCI)
    with pytest.raises(InputError, match=message):
        ManifestOptions(**{"style": "deployment", "image": IMAGE, "model": model_uri(model), **changes})


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("server:1", "server"),
        ("host:5000/server", "host:5000/server"),
        ("host:5000/server:1", "host:5000/server"),
        ("host:5000/server@sha256:12", "host:5000/server"),
    ],
)
def test_the_warning_of_a_tag_names_the_image(image: str, name: str) -> None:
    (warning,) = tag_warnings({"--image": image})
    assert warning.startswith(f"--image {image}: a tag can change; name the digest, {name}@sha256:…,")


def test_a_bundle_with_a_digest_is_stated(bundle: Bundle, tmp_path: Path) -> None:
    written = write(bundle, tmp_path / "out")
    assert written.apply.joinpath("deployment.yaml").read_text().count(bundle.sha256) == 3  # annotation and two probes
    assert DIGEST in written.apply.joinpath("deployment.yaml").read_text()


@pytest.mark.process
def test_the_command(bundle: Bundle, tmp_path: Path, gmmvit: Any) -> None:
    out = tmp_path / "kubernetes"
    answer = gmmvit("manifests", bundle.path, "-o", out, "--image", IMAGE, "--model-uri", OCI)
    assert answer.returncode == 0, answer.stderr
    assert "create the Secret gmmvit-keys" in answer.stderr
    assert answer.stdout.strip() == str(out / "overlays" / "fill-in")
    whole = gmmvit("manifests", bundle.path, "-o", out, "--force", "--image", IMAGE, "--model-uri", OCI, "--tuned",
                   tuning_file(bundle, tmp_path / "tuned.json"))  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    assert "a tag can change" not in whole.stderr
    tag = gmmvit("manifests", bundle.path, "-o", out, "--force", "--image", "host:5000/server:1", "--model-uri", OCI)
    assert "--image host:5000/server:1: a tag can change; name the digest, host:5000/server@sha256:" in tag.stderr


def test_nothing_is_written_over_a_folder(bundle: Bundle, tmp_path: Path) -> None:
    options = ManifestOptions(style="deployment", image=IMAGE, model=model_uri(OCI))
    (tmp_path / "out").mkdir()
    with pytest.raises(Exception, match="exists"):
        manifests_from_bundle(bundle.path, tmp_path / "out", options)
