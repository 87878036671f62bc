"""Read the configurations of a repository: names, bundle, backends, the check of a server, and the tuning."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gmmvit_deploy.bundle.artifacts import MANIFEST_FILE, open_bundle
from gmmvit_deploy.errors import InputError, RepositoryError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.kinds import refuse_checkpoint
from gmmvit_deploy.inference import PROBE_ID
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.serving.gateway.options import HealthCheck
from gmmvit_deploy.serving.model_configs import IMAGE_INPUT, answers_labels, model_configs
from gmmvit_deploy.serving.names import TUNING_FILE
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository_runner import resolved_options

_RAW_ROW_BYTES = 64 * 1024
"""The largest input that the check sends as a tensor.  HAProxy keeps a buffer of this size for each request."""
_THREADS = ("threads", "intra_op_thread_count")
"""The parameter of a network on a CPU that states its threads, in the python and in the onnxruntime backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network of a repository, under the name of the model that clients ask.

    bundle, runner: the SHA-256 of its bundle and its runner; "" if the configuration does not state them.
    outputs: what it answers, such as logits and features.  takes_images: False if it takes only tensors.
    health: the request that checks the network.
    """

    name: str
    bundle: str
    runner: str
    outputs: frozenset[str]
    takes_images: bool
    health: HealthCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """names: of all models.  networks: in the order of their names.
    row_bytes: the size of the largest input of fixed shape.
    backends: model → the backend that runs it, without ensembles.
    runtimes: the runtimes of the networks that the python backend runs.
    limits: network that does not compare itself with the reference outputs when it is loaded, as those of the python
    backend do → name of an output → the largest allowed difference.
    on_gpu: true if a model states that it runs on a GPU.
    network_threads: (instances of the only network on a CPU, threads of each; 0 threads mean a thread for each core);
    None if the repository has no such network, or several.
    """

    names: tuple[str, ...]
    networks: tuple[Network, ...]
    row_bytes: int
    backends: Mapping[str, str] = field(default_factory=dict)
    runtimes: frozenset[str] = frozenset()
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    on_gpu: bool = False
    network_threads: tuple[int, int] | None = None

    @property
    def bundle(self) -> str:
        """The SHA-256 of the bundle of all networks; "" if they differ."""
        return _common(network.bundle for network in self.networks)

    @property
    def bundles_in_words(self) -> str:
        """The SHA-256 of the bundle of all networks; if they differ, NAME=SHA256 of each."""
        different = len({network.bundle for network in self.networks}) > 1
        return ", ".join(f"{each.name}={each.bundle}" for each in self.networks) if different else self.bundle

    @property
    def runner(self) -> str:
        """The runner of all networks; "" if they differ."""
        return _common(network.runner for network in self.networks)

    @property
    def health(self) -> tuple[HealthCheck, ...]:
        """The requests that check a server. They run the first network only, so that none that is slow ends all."""
        first, *others = self.networks
        return first.health, *(HealthCheck(path=f"/v2/models/{network.name}/ready") for network in others)

    def with_images(self, output: str = "") -> tuple[str, ...]:
        """Return the names of the networks that take images, of those with an output if one is named."""
        return tuple(
            network.name
            for network in self.networks
            if network.takes_images and (not output or output in network.outputs)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The measurement of ``gmmvit tune``.

    rate: the highest number of images a second within the limit.  bound_ms: the limit of the p99 latency.
    """

    rate: float
    bound_ms: float

    @property
    def in_flight(self) -> int:
        """⌊rate · bound⌋: with more images than this in the server, an image would wait longer than the limit."""
        return max(2, math.floor(self.rate * self.bound_ms / 1000))

    @property
    def queue_timeout_ms(self) -> int:
        return max(1, round(self.bound_ms))


def read_models(path: Path, *, name: str = "gmmvit") -> ServedModels:
    """Read the models of a repository, or those that ``gmmvit serve`` makes of a bundle.  name: for a bundle.

    Errors: RepositoryError.
    """
    if (path / MANIFEST_FILE).is_file():
        bundle = open_bundle(path)
        options, _ = resolved_options(bundle, RepositoryOptions(name=name))
        made = _served(list(model_configs(bundle, options).values()))
        networks = tuple(replace(network, runner="") for network in made.networks)
        return replace(made, networks=networks, network_threads=None)  # a bundle states neither runner nor threads
    configs = [_parsed(file) for file in sorted(path.glob("*/config.pbtxt"))]
    if not configs:
        if not path.exists():
            raise RepositoryError(f"{path}: no such folder", hint="type the path of a bundle or of a repository")
        refuse_checkpoint(path)
        raise RepositoryError(
            f"{path}: expected a bundle or a model repository, but there is no MODEL/config.pbtxt in this folder",
            hint="type gmmvit export CHECKPOINT -o BUNDLE to write a bundle, and give the bundle; or type gmmvit "
            "repository BUNDLE to write a repository",
        )
    return _served(configs)


def _common(values: Iterable[str]) -> str:
    different = set(values)
    return different.pop() if len(different) == 1 else ""


def _served(configs: Sequence[Any]) -> ServedModels:
    stated = [_stated(config) for config in configs]
    parts = {step.model_name for config in configs for step in config.ensemble_scheduling.step}
    alone = [config for config in configs if not config.HasField("ensemble_scheduling") and config.name not in parts]
    asked = [*filter(_takes_images, configs), *alone]
    return ServedModels(
        names=tuple(sorted(config.name for config in configs)),
        networks=tuple(map(_network, sorted(asked or configs[:1], key=lambda config: str(config.name)))),
        row_bytes=max(_row_bytes(config) for config in configs),
        backends={config.name: config.backend for config in configs if config.backend},
        runtimes=frozenset(
            RunnerName.parse(parameters["gmmvit_runner"]).runtime
            for config, parameters in zip(configs, stated, strict=True)
            if config.backend == "python" and parameters.keys() >= {"gmmvit_runner", "threads"}
        ),
        limits={
            config.name: json.loads(parameters["reference_limits"])
            for config, parameters in zip(configs, stated, strict=True)
            if "reference_limits" in parameters and config.backend != "python"
        },
        on_gpu=any(group.kind == group.KIND_GPU for config in configs for group in config.instance_group),
        network_threads=_network_threads(configs),
    )


def _stated(config: Any) -> dict[str, str]:
    return {name: value.string_value for name, value in config.parameters.items()}


def _network(config: Any) -> Network:
    """Return the network of a model that clients ask: an ensemble that takes images, or a model of no ensemble."""
    takes_images, stated = _takes_images(config), _stated(config)
    return Network(
        name=config.name,
        bundle=stated.get("gmmvit_bundle_sha256", ""),
        runner=stated.get("gmmvit_runner", ""),
        outputs=frozenset(output.name for output in config.output),
        takes_images=takes_images,
        health=_check_with_image(config.name) if takes_images else _check_with_tensor(config),
    )


def _network_threads(configs: Sequence[Any]) -> tuple[int, int] | None:
    stated = [(config, name) for config in configs for name in _THREADS if name in config.parameters]
    if len(stated) != 1:
        return None
    network, name = stated[0]
    threads = network.parameters[name].string_value
    return sum(group.count for group in network.instance_group), int(threads) if threads.isdecimal() else 0


def _parsed(file: Path) -> Any:
    text_format = require("google.protobuf.text_format", package="protobuf", extra="client")
    protobuf = require("tritonclient.grpc.model_config_pb2", package="tritonclient", extra="client")
    config = protobuf.ModelConfig()
    try:
        text_format.Parse(file.read_text(encoding="utf-8"), config, allow_unknown_field=True)  # of a newer Triton
    except (OSError, UnicodeDecodeError, text_format.ParseError) as exc:
        raise RepositoryError(f"{file}: the configuration of the model cannot be read: {exc}") from exc
    config.name = config.name or file.parent.name
    return config


_BYTES = {"TYPE_UINT8": 1, "TYPE_INT8": 1, "TYPE_FP16": 2, "TYPE_FP32": 4}


def _row_bytes(config: Any) -> int:
    """Return the size of a row of the only input in bytes; 0 for a variable size or several inputs."""
    if len(config.input) != 1 or min(config.input[0].dims, default=0) < 1:
        return 0
    data_type = config.input[0].DESCRIPTOR.fields_by_name["data_type"].enum_type
    name = data_type.values_by_number[config.input[0].data_type].name
    return int(_BYTES.get(name, 0) * math.prod(config.input[0].dims))


def _takes_images(config: Any) -> bool:
    takes = config.platform == "ensemble" and [tensor.name for tensor in config.input] == [IMAGE_INPUT]
    return takes and not answers_labels(config)


def _check_with_tensor(config: Any) -> HealthCheck:
    size = _row_bytes(config)
    if 0 < size <= _RAW_ROW_BYTES:
        # Triton's raw form: the body is the tensor, here of the byte 0x41, which is a finite number in every type.
        raw = (("inference-header-content-length", "0"), ("content-type", "application/octet-stream"))
        return HealthCheck(path=f"/v2/models/{config.name}/infer", body="A" * size, headers=raw)
    why_not = f"{config.name} takes neither an encoded image nor a tensor of at most {_RAW_ROW_BYTES} bytes"
    return HealthCheck(path=f"/v2/models/{config.name}/ready", why_not=why_not)


def _check_with_image(name: str) -> HealthCheck:
    # A request of HAProxy's check is text. A BMP of a single black pixel has no byte above 0x7f, so JSON can hold it.
    file_header = struct.pack("<2sIHHI", b"BM", 58, 0, 0, 54)
    header = file_header + struct.pack("<IiiHHIIiiII", 40, 1, 1, 1, 24, 0, 4, 0, 0, 0, 0)
    image = (header + bytes(4)).decode("ascii")
    tensor = {"name": IMAGE_INPUT, "shape": [1, 1], "datatype": "BYTES", "data": [image]}
    body = json.dumps({"id": PROBE_ID, "inputs": [tensor]}, separators=(",", ":"))
    return HealthCheck(path=f"/v2/models/{name}/infer", body=body, headers=(("content-type", "application/json"),))


def read_tuning(repository: Path) -> Tuned | None:
    """Return the measurement of ``gmmvit tune`` in the repository, or None.  Errors: InputError for another form."""
    file = repository / TUNING_FILE
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return Tuned(rate=float(data["rate"]), bound_ms=float(data["bound_ms"]))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InputError(
            f"{file}: expected the measurement of gmmvit tune, JSON with the numbers rate and bound_ms, "
            + (f"got {exc.strerror}" if isinstance(exc, OSError) else "got other content"),
            hint="type gmmvit tune BUNDLE to measure again, or remove the file",
        ) from exc
