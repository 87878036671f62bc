"""What the user chooses for the manifests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from gmmvit_deploy.errors import InputError

__all__ = ["STYLES", "ManifestOptions", "ModelUri", "Style", "model_uri", "require_names", "tag_warnings"]

Style = Literal["kserve", "deployment"]
STYLES: tuple[Style, ...] = get_args(Style)
_SCHEMES = ("oci", "pvc", "s3")
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
_PINNED = re.compile(r"\S+@sha256:[0-9a-f]{64}")
_TAG = re.compile(r":[^:/]*$")  # a colon before a slash begins the port of a registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUri:
    """Where the model is.

    scheme: ``oci``, ``pvc`` or ``s3``.  place: the image, the claim, or the bucket.  path: below it; "" for ``oci``.
    """

    scheme: str
    place: str
    path: str

    @property
    def image(self) -> str:
        """The image that holds the model; "" for a claim or a bucket."""
        return self.place if self.scheme == "oci" else ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}" + (f"/{self.path}" if self.path else "")


def model_uri(text: str) -> ModelUri:
    """Read ``oci://IMAGE``, ``pvc://CLAIM/PATH`` or ``s3://BUCKET/PATH``.  Errors: InputError."""
    scheme, _, rest = text.partition("://")
    if scheme not in _SCHEMES or not rest.strip("/"):
        raise InputError(f"--model-uri: expected oci://IMAGE, pvc://CLAIM/PATH or s3://BUCKET/PATH, got {text!r}")
    if scheme == "oci":
        return ModelUri(scheme=scheme, place=rest, path="")
    place, _, path = rest.partition("/")
    return ModelUri(scheme=scheme, place=place, path=path.strip("/"))


def tag_warnings(images: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each image, by option, that is named by a tag, which can change; none for the image ""."""
    return tuple(
        f"{option} {image}: a tag can change; name the digest, {_TAG.sub('', image.partition('@')[0])}@sha256:…, which "
        "docker buildx imagetools inspect prints"
        for option, image in images.items()
        if image and not _PINNED.fullmatch(image)
    )


def require_names(names: Mapping[str, str]) -> None:
    """Check that names, by option, are valid in Kubernetes or "".  Errors: InputError."""
    for option, name in names.items():
        if name and not _NAME.fullmatch(name):
            raise InputError(f"{option}: expected lower-case letters, digits and -, at most 50, got {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """style: ``kserve``, or ``deployment`` for plain Kubernetes.
    image: of the server.  model: where the repository to serve is.
    name: the name of all objects.  model_name: the name of the served model.
    clients: the namespace whose pods may send requests; "" permits the pods of the service's own namespace that have
    the label ``gmmvit-client: "true"``.  monitoring: the namespace of Prometheus.
    fetch_image: for s3 in the style deployment, an image that is called with the URI and a folder, and copies files.
    max_body_bytes: the maximum size of a request.  gpus: of each pod.  least, most: number of pods.
    Errors: InputError when a value is invalid.
    """

    style: Style
    image: str
    model: ModelUri
    name: str = "gmmvit"
    model_name: str = "gmmvit"
    clients: str = ""
    monitoring: str = "monitoring"
    fetch_image: str = ""
    max_body_bytes: int = 4 * 2**20
    gpus: int = 0
    least: int = 2
    most: int = 10

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know, a sentence each."""
        images = {"--image": self.image, "--fetch-image": self.fetch_image, "--model-uri": self.model.image}
        return tag_warnings(images)

    @property
    def tls(self) -> bool:
        """True if the pod itself does TLS.  KServe's ingress does TLS, and speaks plain HTTP to the pods."""
        return self.style == "deployment"

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise InputError(f"--style: expected one of {', '.join(STYLES)}, got {self.style!r}")
        require_names({"--object-name": self.name, "--clients": self.clients, "--monitoring": self.monitoring})
        if self.model.scheme == "s3" and self.style == "deployment" and not self.fetch_image:
            raise InputError(
                "--model-uri s3://… in the style deployment needs --fetch-image, an image that copies the files",
                hint="KServe's storage-initializer is such an image: --fetch-image IMAGE@sha256:…",
            )
        if self.max_body_bytes < 1024:
            raise InputError(f"--max-body: expected at least 1024 bytes, got {self.max_body_bytes}")
        if not 2 <= self.least <= self.most:
            raise InputError(
                f"--replicas: expected 2 pods at least, and not more than the maximum, got {self.least}:{self.most}"
            )
