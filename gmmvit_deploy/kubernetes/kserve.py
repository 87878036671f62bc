"""ServingRuntime and InferenceService of KServe, for its mode with plain Deployments and the protocol v2."""

from __future__ import annotations

from typing import Any

from gmmvit_deploy.kubernetes.objects import named, selector
from gmmvit_deploy.kubernetes.options import ManifestOptions
from gmmvit_deploy.kubernetes.pod import container, pod_security, resources, stated_sizes, volumes
from gmmvit_deploy.kubernetes.sizes import FILL_IN, Sizes

__all__ = ["fill_in_kserve", "inference_service", "serving_runtime"]

_FORMAT = "gmmvit"
_CONTAINER = "kserve-container"  # KServe looks for this name


def serving_runtime(options: ManifestOptions, sizes: Sizes, *, bundle: str, probed: str) -> dict[str, Any]:
    """Return the runtime: the container with its probes, which all InferenceServices of this format share."""
    server = container(options, sizes, name=_CONTAINER, bundle=bundle, probed=probed, mounts_model=False)
    server.pop("resources", None)  # those of the InferenceService apply
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": named(options),
        "spec": {
            "supportedModelFormats": [{"name": _FORMAT, "version": "1", "autoSelect": False}],
            "protocolVersions": ["v2", "grpc-v2"],
            "multiModel": False,
            "containers": [server],
            "volumes": volumes(options, sizes),
        },
    }


def inference_service(options: ManifestOptions, sizes: Sizes, *, bundle: str) -> dict[str, Any]:
    """Return the service.  The autoscaler is our own, because KServe's knows no queue time."""
    metadata = named(options)
    metadata["annotations"] = {
        "serving.kserve.io/deploymentMode": "RawDeployment",
        "serving.kserve.io/autoscalerClass": "external",
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(options)},
    }
    security = pod_security()
    model = {
        "modelFormat": {"name": _FORMAT},
        "runtime": options.name,
        "protocolVersion": "v2",
        "storageUri": _storage_uri(options),
        **({"resources": resources(sizes, options.gpus)} if sizes.known else {}),
    }
    predictor = {
        "annotations": stated_sizes(sizes, bundle),
        "minReplicas": options.least,
        "maxReplicas": options.most,
        **security,
        "topologySpreadConstraints": [spread],
        "model": model,
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": predictor},
    }


def _storage_uri(options: ManifestOptions) -> str:
    """Return the URI for KServe.  Its plain ``oci://`` runs a shell of the image; ours has files only, and
    ``oci+native://`` mounts them.
    """
    return f"oci+native://{options.model.place}" if options.model.scheme == "oci" else str(options.model)


def fill_in_kserve(name: str) -> dict[str, Any]:
    """Return the patch of an InferenceService whose values an operator must fill in."""
    quantities = {"cpu": FILL_IN, "memory": FILL_IN}
    stated = {"gmmvit/instances": FILL_IN, "gmmvit/threads": FILL_IN}
    model = {"resources": {"requests": dict(quantities), "limits": quantities}}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"predictor": {"annotations": stated, "model": model}},
    }
