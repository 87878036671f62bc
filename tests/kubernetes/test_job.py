"""The Indexed Job: valid for Kubernetes, and its command does the work for each index.

The command runs as it stands in the manifest, with the packages of the image alone. Only the kubelet's part is played
here: mounted volumes are paths of this machine, and JOB_COMPLETION_INDEX is set.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy.bulk.run import INDEX_VARIABLE, classify_source
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError
from gmmvit_deploy.kubernetes._dockerfiles import bulk_docker_files, bulk_packages
from gmmvit_deploy.kubernetes.options import JobOptions, location
from gmmvit_deploy.kubernetes.write import WrittenManifests, job_manifests_from_bundle
from tests.bulk.sources import images, write_folder
from tests.bulk.test_runs import await_shards, shards_in, strangers_in
from tests.kubernetes.made import COMPILERS, IMAGE, OCI, hadolint, linked_environment, object_in, objects_in, validate

PARTS, COUNT, SHARD, BROKEN = 3, 120, 8, 50
CLAIM = "pvc://models/vit/3"


def written_job(bundle: Bundle, out: Path, **changes: Any) -> WrittenManifests:
    values: dict[str, Any] = {"model": OCI, "source": "pvc://images/2026", "results": "pvc://results", "memory": "2Gi"}
    values = {**values, **changes}
    values["model"] = location(values["model"], "--model-uri", oci=True)
    values |= {"source": location(values["source"], "--from"), "results": location(values["results"], "--to")}
    options = {"image": IMAGE, "parts": PARTS, "fetch_image": IMAGE, **values}
    return job_manifests_from_bundle(bundle.path, out, JobOptions(**options))


@pytest.mark.first(2)
@pytest.mark.integration
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": CLAIM, "source": "pvc://models/images", "results": "pvc://models/results"},
        {"model": "s3://bucket/bundle", "source": "s3://bucket/images/*.tar", "results": "s3://bucket/results"},
    ],
    ids=["oci-and-claims", "a-single-claim", "object-store"],
)
def test_a_job_is_valid_for_kubernetes(bundle: Bundle, tmp_path: Path, changes: dict[str, str]) -> None:
    written = written_job(bundle, tmp_path / "out", **changes)
    validate(written.apply)
    names = [f"{item['kind']}/{item['metadata']['name']}" for item in objects_in(written.apply)]
    assert names == ["Job/gmmvit-bulk", "NetworkPolicy/gmmvit-bulk"]


def test_a_claim_with_several_uses_is_a_single_volume(bundle: Bundle, tmp_path: Path) -> None:
    both = {"model": CLAIM, "source": "pvc://models/images", "results": "pvc://models/results"}
    pod = object_in(written_job(bundle, tmp_path / "out", **both), "Job")["spec"]["template"]["spec"]
    claims = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [{"name": "model", "persistentVolumeClaim": {"claimName": "models"}}]
    (container,) = pod["containers"]
    read_only = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert read_only == {"/tmp": False, "/mnt/models": True, "/mnt/source": True, "/mnt/results": False}
    assert "--bundle /mnt/models/vit/3 --from /mnt/source/images --to /mnt/results/results" in " ".join(
        container["args"]
    )


def test_an_object_store_is_reached_with_a_secret_and_nothing_else_is(bundle: Bundle, tmp_path: Path) -> None:
    stored = written_job(bundle, tmp_path / "stored", source="s3://bucket/images", results="s3://bucket/results")
    assert [*stored.secrets] == ["gmmvit-store"]
    egress = object_in(stored, "NetworkPolicy")["spec"]["egress"]
    assert [port["port"] for port in egress[0]["ports"]] == [53, 53, 443]
    claimed = written_job(bundle, tmp_path / "claimed")
    assert claimed.secrets == {}
    assert "envFrom" not in claimed.apply.joinpath("job.yaml").read_text()


@pytest.mark.integration
def test_hadolint_has_no_complaint(tmp_path: Path) -> None:
    for store in (False, True):
        text = bulk_docker_files("onnxruntime", store=store)["docker/bulk/Dockerfile"]
        assert ("s3fs==" in text) is store
        file = tmp_path / f"Dockerfile{store:d}"
        file.write_text(text)
        assert hadolint(file) == ""


@pytest.mark.nightly
@pytest.mark.integration
def test_each_index_does_its_part_also_after_a_kill(bundle: Bundle, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "images", images(COUNT, broken=BROKEN))
    quiet = tmp_path / "quiet"
    classify_source(bundle.path, str(source), str(quiet), runner="onnxruntime", shard_images=SHARD, workers=1)
    written = written_job(bundle, tmp_path / "out", source="pvc://images", more=("--shard-images", str(SHARD)))
    (container,) = object_in(written, "Job")["spec"]["template"]["spec"]["containers"]
    folder = tmp_path / "results"
    mounted = {"/mnt/models/models": bundle.path, "/mnt/source": source, "/mnt/results": folder}
    python = linked_environment(tmp_path / "venv", [*bulk_packages("onnxruntime")])
    assert container["command"] == ["tini", "--", "gmmvit"]
    assert not [name for name in COMPILERS if shutil.which(name, path=str(python.parent))]
    command = [python, "-m", "gmmvit_cli.main", *(str(mounted.get(word, word)) for word in container["args"])]
    clean = {"PATH": str(python.parent), "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}  # no compiler

    def pod(index: int) -> subprocess.Popen[bytes]:
        environment = {**clean, INDEX_VARIABLE: str(index)}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )

    killed = pod(1)
    await_shards(folder, 1, killed)
    assert killed.poll() is None, killed.communicate()[0].decode()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL, "the pod ended before it was killed"
    for index in (0, 1, 2):
        assert len(shards_in(folder)) < COUNT // SHARD
        done = pod(index)
        output, _ = done.communicate(timeout=120)
        assert done.returncode == 0, output.decode()
    assert shards_in(folder) == shards_in(quiet)
    assert strangers_in(folder) == []
    assert (folder / "_report.html").is_file()


@pytest.mark.integration
def test_a_wrong_command_line_ends_the_whole_job(bundle: Bundle, tmp_path: Path, gmmvit: Any) -> None:
    job = object_in(written_job(bundle, tmp_path / "out"), "Job")
    codes = [
        rule["onExitCodes"]["values"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    assert codes == [[2]]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert gmmvit(*container["args"], "--not-an-option").returncode == 2
    refused = gmmvit(*container["args"], "--bundle", tmp_path / "nowhere")
    assert refused.returncode == 1, "a refusal is an error of the index: another node can have the volume"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "/data/images"}, "--from: expected pvc://CLAIM/PATH or s3://BUCKET/PATH"),
        ({"results": "gs://bucket"}, "--to: expected pvc://CLAIM/PATH or s3://BUCKET/PATH"),
        ({"parts": 0}, "--parts and --workers of 1 at least"),
        ({"memory": "lots"}, "--memory: expected a size such as 4Gi"),
        ({"runner": "eager"}, "no compiler, no PyTorch and no CUDA"),
        ({"model": "s3://bucket/bundle", "fetch_image": ""}, "needs --fetch-image"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_options_are_refused(bundle: Bundle, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        written_job(bundle, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
@pytest.mark.integration
def test_the_command(bundle: Bundle, tmp_path: Path, gmmvit: Any) -> None:
    out = tmp_path / "kubernetes"
    words = ["manifests", bundle.path, "-o", out, "--style", "job", "--image", IMAGE, "--model-uri", OCI, "--force"]
    places = ["--from", "pvc://images", "--to", "s3://bucket/results"]
    missing = gmmvit(*words, *places)
    assert (missing.returncode, "--parts is missing" in missing.stderr) == (1, True)
    unfit = gmmvit(*words, *places, "--parts", 4, "--replicas", "3:5")
    assert (unfit.returncode, "--replicas does not go with --style job" in unfit.stderr) == (1, True)
    other = gmmvit("manifests", bundle.path, "-o", out, "--image", IMAGE, "--model-uri", OCI, "--workers", 2)
    assert (other.returncode, "--workers does not go with --style deployment" in other.stderr) == (1, True)
    assert not out.exists()
    answer = gmmvit(*words, *places, "--parts", 4, "--workers", 2, "--shard-images", 50)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == str(out / "overlays" / "fill-in")
    assert "create the Secret gmmvit-store" in answer.stderr
    assert (out / "overlays" / "fill-in" / "sizes.yaml").read_text().count(": FILL_IN") == 2
    whole = gmmvit(*words, *places, "--parts", 4, "--workers", 2, "--memory", "4Gi", "--runner", "openvino:bf16")
    assert (whole.returncode, whole.stdout.strip()) == (0, str(out / "base")), whole.stderr
    assert "openvino==" in (out / "docker" / "bulk" / "requirements.txt").read_text()
