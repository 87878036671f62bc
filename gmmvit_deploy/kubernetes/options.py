"""What the user chooses for the manifests of a service, or of a job in bulk."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.runtimes.runners.names import runner_from
from gmmvit_deploy.serving.gateway.options import MIN_BODY_BYTES

_JOB_RUNNERS = ("onnxruntime", "openvino")
"""Runners whose packages are in the image for bulk work, which has no compiler, no PyTorch and no CUDA."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_DIGEST = re.compile(r"@(?!sha256:[0-9a-f]{64}$)")
_PINNED = re.compile(r"\S+@sha256:[0-9a-f]{64}")
_TAG = re.compile(r":[^:/]*$")  # a colon before a slash begins the port of a registry
_MEMORY = re.compile(r"[1-9][0-9]*(Mi|Gi)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a model, images or results are.

    scheme: ``oci``, ``pvc`` or ``s3``.  name: the image, the claim, or the bucket.  path: below it; "" for ``oci``.
    """

    scheme: str
    name: str
    path: str

    @property
    def claim(self) -> str:
        """The PersistentVolumeClaim; "" for an image or a bucket."""
        return self.name if self.scheme == "pvc" else ""

    def inside(self, folder: str) -> str:
        """Return the path in a pod that mounts the claim at ``folder``, or the URL of an object store."""
        return f"{folder}/{self.path}".rstrip("/") if self.claim else str(self)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}" + (f"/{self.path}" if self.path else "")


def location(text: str, option: str, *, oci: bool = False) -> Location:
    """Read ``pvc://CLAIM/PATH`` or ``s3://BUCKET/PATH``, and with ``oci`` also ``oci://IMAGE``.  Errors: InputError."""
    scheme, _, rest = text.partition("://")
    if scheme not in ("pvc", "s3", *(["oci"] if oci else [])) or not rest.strip("/"):
        images = "oci://IMAGE, " if oci else ""
        raise InputError(f"{option}: expected {images}pvc://CLAIM/PATH or s3://BUCKET/PATH, got {text!r}")
    if scheme == "oci":
        return Location(scheme=scheme, name=rest, path="")
    name, _, path = rest.partition("/")
    if ".." in path.split("/") or (scheme == "pvc" and not _CLAIM.fullmatch(name)):
        raise InputError(f"{option}: expected a name of a claim, and a path without .., got {text!r}")
    return Location(scheme=scheme, name=name, path=path.strip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """image: of the pod.  model: where the repository to serve, or the bundle of a job, is.
    name: the name of the objects.
    fetch_image: for a model at s3 that KServe does not fetch, an image that is called with the URI and a folder, and
    copies files.
    """

    image: str
    model: Location
    name: str = "gmmvit"
    fetch_image: str = ""

    @property
    def images(self) -> dict[str, str]:
        """Option → the image that it names, or ""."""
        model_image = self.model.name if self.model.scheme == "oci" else ""
        return {"--image": self.image, "--fetch-image": self.fetch_image, "--model-uri": model_image}

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each image that is named by a tag, which can change."""
        return tuple(
            f"{option} {image}: a tag can change; name the digest, {_TAG.sub('', image.partition('@')[0])}@sha256:…, "
            "which docker buildx imagetools inspect prints"
            for option, image in self.images.items()
            if image and not _PINNED.fullmatch(image)
        )

    @property
    def model_path(self) -> str:
        """The path of the model in a pod, without KServe."""
        if self.model.scheme == "oci":
            return "/mnt/models/models"  # gmmvit pack writes below this folder of the image, where KServe looks as well
        return self.model.inside("/mnt/models") if self.model.claim else "/mnt/models"


def _require_valid(options: PodOptions, names: Mapping[str, str], style: str) -> None:
    """Check what all pods have.  names: option → name in Kubernetes, or "".  KServe fetches a model at s3 itself."""
    for option, image in options.images.items():
        if _DIGEST.search(image):
            raise InputError(
                f"{option} {image}: expected 64 hexadecimal digits behind @sha256:",
                hint=f"docker buildx imagetools inspect {image.partition('@')[0]} prints the digest",
            )
    for option, name in {"--object-name": options.name, **names}.items():
        if name and not _NAME.fullmatch(name):
            raise InputError(f"{option}: expected lower-case letters, digits and -, at most 50, got {name!r}")
    if style != "kserve" and options.model.scheme == "s3" and not options.fetch_image:
        raise InputError(
            f"--model-uri s3://… in the style {style} needs --fetch-image, an image that copies the files",
            hint="KServe's storage-initializer is such an image: --fetch-image IMAGE@sha256:…",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions(PodOptions):
    """style: ``kserve``, or ``deployment`` for plain Kubernetes.  model_name: the name of the served model.
    clients: the namespace whose pods may send requests; "" permits the pods of the service's own namespace that have
    the label ``gmmvit-client: "true"``.  monitoring: the namespace of Prometheus.
    max_body_bytes: the maximum size of a request.  gpus: of each pod; at least 1 for a repository that
    runs on a GPU.  min_pods, max_pods: number of pods.
    Errors: InputError when a value is invalid.
    """

    style: Literal["kserve", "deployment"]
    model_name: str = "gmmvit"
    clients: str = ""
    monitoring: str = "monitoring"
    max_body_bytes: int = 4 * 2**20
    gpus: int = 0
    min_pods: int = 2
    max_pods: int = 10

    def __post_init__(self) -> None:
        names = {"--clients": self.clients, "--monitoring": self.monitoring}
        _require_valid(self, names, self.style)
        if self.max_body_bytes < MIN_BODY_BYTES:
            raise InputError(f"--max-body: expected at least {MIN_BODY_BYTES} bytes, got {self.max_body_bytes}")
        if not 2 <= self.min_pods <= self.max_pods:
            raise InputError(
                "--replicas: expected 2 pods at least, and not more than the maximum, "
                f"got {self.min_pods}:{self.max_pods}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(PodOptions):
    """source, results: ``--from`` and ``--to``.  parts: number of indexes, each a pod.
    workers: processes of a pod, each with a core.  memory: of a pod, as Kubernetes writes it; "" to fill it in.
    runner: name and precision.  more: further words for ``gmmvit classify``.
    Errors: InputError when a value is invalid.
    """

    source: Location
    results: Location
    parts: int
    workers: int = 1
    memory: str = ""
    runner: str = "onnxruntime"
    more: tuple[str, ...] = ()

    @property
    def uses_store(self) -> bool:
        """True if a pod opens connections to an object store."""
        return "s3" in (self.model.scheme, self.source.scheme, self.results.scheme)

    @property
    def claims(self) -> dict[str, str]:
        """Claim → name of its volume.  A claim that has several uses is a single volume of the pod."""
        claims: dict[str, str] = {}
        for volume, used in (("model", self.model), ("source", self.source), ("results", self.results)):
            if used.claim:
                claims.setdefault(used.claim, volume)
        return claims

    def __post_init__(self) -> None:
        _require_valid(self, {}, "job")
        if self.parts < 1 or self.workers < 1:
            raise InputError(f"expected --parts and --workers of 1 at least, got {self.parts} and {self.workers}")
        if self.memory and not _MEMORY.fullmatch(self.memory):
            raise InputError(f"--memory: expected a size such as 4Gi or 512Mi, got {self.memory!r}")
        if runner_from(self.runner).name not in _JOB_RUNNERS:
            raise InputError(
                f"--runner {self.runner}: the image for bulk work has no compiler, no PyTorch and no CUDA",
                hint=f"type --runner with one of {', '.join(_JOB_RUNNERS)}, and a precision behind it if you like",
            )
