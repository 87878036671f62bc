"""Build the ``config.pbtxt`` files of the models in a Triton repository.

<name>             ensemble of the two models below: IMAGE (encoded bytes) → logits, features or both
<name>_preprocess  IMAGE → the network's input: pixels or tensor
<name>_network     pixels or tensor → logits, features or both
<name>_labels      logits → label, probability, index; for a multi-label network also present
<name>_classify    ensemble of <name>_preprocess, <name>_network and <name>_labels: IMAGE → the outputs of the latter

The network and the ensembles of a cascade also answer with ``deferred``: whether float32 computed the image again.

Triton 2.51 waits for ever when a client asks an ensemble only for outputs of its last model, while the ensemble also
has an output that the last model reads. So the logits and the labels are outputs of two ensembles.

A Triton repository is the folder of models that a Triton server loads. Each configuration is built as a protobuf and
converted to text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.bundle.cascades import cascade_file, read_cascade
from gmmvit_deploy.bundle.choices import recorded_answers
from gmmvit_deploy.bundle.variants import VariantRecord, record_file, record_of
from gmmvit_deploy.errors import InputError, RepositoryError
from gmmvit_deploy.extras import require
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.cores import cores
from gmmvit_deploy.inference.precision import QUANTIZED, SPECS
from gmmvit_deploy.inference.preprocess import SMALL_PIXELS
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.runners.open import graph_of
from gmmvit_deploy.runtimes.runners.right_outputs import output_limits
from gmmvit_deploy.serving.names import DEFAULT_REQUEST_PIXELS
from gmmvit_deploy.serving.options import RepositoryOptions

if TYPE_CHECKING:
    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.runtimes.engines.card import EngineCard

LABELS_FILE = "labels.txt"
WARMUP_FILE = "image"
"""File in ``<name>_preprocess/warmup/``: an encoded image after its length, which is Triton's byte string format."""
IMAGE_INPUT = "IMAGE"
_LABEL, _LOGITS = "label", "logits"
WORKER_REQUESTS = 2
"""The number of requests of maximum size whose large images wait in the preprocessing model; more are refused."""


def model_configs(bundle: Bundle, options: RepositoryOptions, card: EngineCard | None = None) -> dict[str, Any]:
    """Return model name → ``ModelConfig`` protobuf for the models of a repository; clients call the first.

    A bundle without mean and std has only the network: preprocessing and ensembles need a normalisation. A bundle
    without logits has no labels.
    options: state a runner.  card: the report that ``gmmvit build`` wrote beside the engine, for the tensorrt backend.
    """
    runner = RunnerName(card.flavor, card.precision) if card is not None else options.runner
    if runner is None:
        raise RepositoryError(f"{bundle.path}: the options of the repository state no runner")
    configs = [_network(bundle, options, runner, card)]
    if bundle.manifest.image.normalisation is not None:
        ensemble = partial(_ensemble, bundle, options, cascade=runner.cascade)
        configs = [ensemble(options.name), *configs, _preprocess(bundle, options)]
        if bundle.manifest.has_logits:
            configs.insert(1, ensemble(options.classify))
            configs.append(_labels(bundle, options))
    for config in configs:
        _state(config, {"gmmvit_runner": str(runner)})
    return {config.name: config for config in configs}


def config_text(config: Any) -> str:
    """Return the text of ``config.pbtxt``."""
    text_format = require("google.protobuf.text_format", package="protobuf", extra="client")
    return str(text_format.MessageToString(config))


def _protobuf() -> Any:
    return require("tritonclient.grpc.model_config_pb2", package="tritonclient", extra="client")


def _skeleton(bundle: Bundle, name: str) -> Any:
    config = _protobuf().ModelConfig(name=name, max_batch_size=bundle.manifest.max_batch)
    stated = {
        "gmmvit_bundle_sha256": bundle.sha256,
        "gmmvit_checkpoint_sha256": bundle.manifest.checkpoint["sha256"],
        "gmmvit_labels": json.dumps(bundle.manifest.labels),
        "gmmvit_task": bundle.manifest.task,
        "gmmvit_thresholds": json.dumps(bundle.manifest.thresholds),
    }
    _state(config, stated)
    return config


def _state(config: Any, parameters: Mapping[str, str]) -> None:
    for key, value in parameters.items():
        config.parameters[key].string_value = value


def _input_tensor(bundle: Bundle) -> dict[str, Any]:
    pb = _protobuf()
    kind = bundle.manifest.input_kind
    data_type = pb.TYPE_UINT8 if kind == "pixels" else pb.TYPE_FP32
    return {"name": kind, "data_type": data_type, "dims": bundle.input_shape}


def _add_outputs(config: Any, bundle: Bundle, *, cascade: bool) -> None:
    for output in bundle.manifest.outputs:
        labels = {"label_filename": LABELS_FILE} if output.name == "logits" else {}
        config.output.add(name=output.name, data_type=_protobuf().TYPE_FP32, dims=output.shape, **labels)
    if cascade:
        _add_deferred(config)


def _add_deferred(config: Any) -> None:
    config.output.add(name=DEFERRED, data_type=_protobuf().TYPE_BOOL, dims=[1])


def _network(bundle: Bundle, options: RepositoryOptions, runner: RunnerName, card: EngineCard | None) -> Any:
    pb = _protobuf()
    config = _skeleton(bundle, options.network)
    if card is not None:
        config.max_batch_size = min(config.max_batch_size, card.max_batch)
        _state(config, {"gmmvit_plan_sha256": card.sha256["plan"]})
    record = _record_served(bundle, runner, card)
    if record is not None or runner.precision not in QUANTIZED:
        limits = output_limits(bundle, runner.precision, runner.form)
        _state(config, {"reference_limits": json.dumps(limits)})
    if record is not None:
        _state(config, _evidence(bundle, record))
    if runner.cascade:
        _state(config, _deferral(bundle, runner))
    config.backend = options.backend
    config.input.add(**_input_tensor(bundle))
    _add_outputs(config, bundle, cascade=runner.cascade)
    kind = pb.ModelInstanceGroup.KIND_GPU if options.on_gpu else pb.ModelInstanceGroup.KIND_CPU
    group = config.instance_group.add(count=options.instances, kind=kind)
    if card is not None and len(card.profiles) > 1:
        group.profile.extend(map(str, range(len(card.profiles))))  # by default Triton uses only the first profile
    if options.accelerator:
        accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator.add(name=options.accelerator)
        if options.accelerator == "cuda":
            accelerator.parameters["use_tf32"] = "0"  # as the runner onnxruntime-cuda
        else:
            # The graph states the data type of each tensor; this setting only permits the data types in the graph.
            accelerator.parameters["precision_mode"] = SPECS[runner.precision].tensorrt_mode
    config.dynamic_batching.max_queue_delay_microseconds = options.max_queue_delay_us
    if options.backend == "onnxruntime":
        # Without a number, ONNX Runtime starts a thread for each core of the machine, and binds each thread to a core,
        # also to cores outside the affinity.
        _state(config, {"intra_op_thread_count": str(options.threads or cores())})
    if options.backend == "python":
        _state(config, {"threads": str(options.threads)})
        if answers := recorded_answers(bundle.path):
            _state(config, {"expected_answers": json.dumps(answers)})
    # The python backend runs these batches itself, to compare them with the reference outputs.
    for batch in sorted({1, config.max_batch_size}) if options.backend != "python" else ():
        sample = config.model_warmup.add(name=f"batch {batch}", batch_size=batch)
        tensor = _input_tensor(bundle)
        sample.inputs[tensor.pop("name")].CopyFrom(pb.ModelWarmup.Input(**tensor, random_data=True))
    return config


def _record_served(bundle: Bundle, runner: RunnerName, card: EngineCard | None) -> VariantRecord | None:
    """Return the record of a quantised graph; None for an engine from a graph that is no longer in the bundle."""
    record = record_of(bundle, runner.precision, runner.form) if runner.precision in QUANTIZED else None
    return None if record and card and card.sha256["onnx"] != record.onnx_sha256 else record


def _evidence(bundle: Bundle, record: VariantRecord) -> dict[str, str]:
    """Return what names the record of a quantised graph: its SHA-256, the calibration images, and the recipe."""
    named = ("images", "sha256", "recipe", "gate")  # not the source, which is a path of the machine that converted
    calibration = {key: value for key, value in (record.calibration or {}).items() if key in named}
    evidence = {"gmmvit_record_sha256": sha256_of_file(bundle.path / record_file(record.precision, record.form))}
    if calibration:
        evidence["gmmvit_calibration"] = json.dumps(calibration, ensure_ascii=False)
    return evidence


def _deferral(bundle: Bundle, runner: RunnerName) -> dict[str, str]:
    """Return which images a cascade computes again, the limits of their outputs, and what names the evidence."""
    record = read_cascade(bundle, runner, graph_of(bundle, runner).sha256)
    return {
        "deferral_threshold": repr(record.threshold),
        "again_limits": json.dumps(output_limits(bundle, "fp32", "")),
        "gmmvit_cascade_sha256": sha256_of_file(bundle.path / cascade_file(runner)),
    }


def _preprocess(bundle: Bundle, options: RepositoryOptions) -> Any:
    pb = _protobuf()
    config = _skeleton(bundle, options.preprocess)
    config.backend = "python"
    config.input.add(name=IMAGE_INPUT, data_type=pb.TYPE_STRING, dims=[1])
    config.output.add(**_input_tensor(bundle))
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    config.dynamic_batching.max_queue_delay_microseconds = 0
    settings = {**bundle.manifest.image.to_json(), "threads": options.preprocess_threads}
    _state(config, {"preprocessing": json.dumps(settings)})
    _state_pixels(config, bundle, options)
    sample = config.model_warmup.add(name="one image", batch_size=1)
    sample.inputs[IMAGE_INPUT].CopyFrom(
        pb.ModelWarmup.Input(data_type=pb.TYPE_STRING, dims=[1], input_data_file=WARMUP_FILE)
    )
    return config


def _state_pixels(config: Any, bundle: Bundle, options: RepositoryOptions) -> None:
    image = bundle.manifest.image
    if options.request_pixels < image.height * image.width:
        raise InputError(
            f"request_pixels: expected at least {image.height * image.width}, the pixels of an input of the network, "
            f"got {options.request_pixels}",
            hint=f"type --request-pixels {DEFAULT_REQUEST_PIXELS}, the default",
        )
    waiting = WORKER_REQUESTS * options.request_pixels
    _state(config, {"request_pixels": str(options.request_pixels), "worker_pixels": str(waiting)})


def _ensemble(bundle: Bundle, options: RepositoryOptions, name: str, *, cascade: bool) -> Any:
    """Return the ensemble from images to the outputs of the network, or to labels if its name is that of `classify`."""
    config = _skeleton(bundle, name)
    _state_pixels(config, bundle, options)
    image = bundle.manifest.image
    # Small files often have up to twice the network's height and width.
    _state(config, {"grouped_images": str(max(1, SMALL_PIXELS // (4 * image.height * image.width)))})
    config.platform = "ensemble"
    config.input.add(name=IMAGE_INPUT, data_type=_protobuf().TYPE_STRING, dims=[1])
    between = bundle.manifest.input_kind
    _add_step(config, options.preprocess, [IMAGE_INPUT], [between])
    if name == options.name:
        _add_outputs(config, bundle, cascade=cascade)
        _add_step(config, options.network, [between], [output.name for output in config.output])
    else:
        _add_label_outputs(config, bundle)
        _add_step(config, options.network, [between], [_LOGITS, DEFERRED] if cascade else [_LOGITS])
        _add_step(config, options.labels, [_LOGITS], [output.name for output in config.output])
        if cascade:
            _add_deferred(config)
    return config


def _add_step(config: Any, model: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    step = config.ensemble_scheduling.step.add(model_name=model, model_version=-1)
    step.input_map.update(zip(inputs, inputs, strict=True))
    step.output_map.update(zip(outputs, outputs, strict=True))


def _labels(bundle: Bundle, options: RepositoryOptions) -> Any:
    pb = _protobuf()
    config = _skeleton(bundle, options.labels)
    config.backend = "python"
    (shape,) = [output.shape for output in bundle.manifest.outputs if output.name == _LOGITS]
    config.input.add(name=_LOGITS, data_type=pb.TYPE_FP32, dims=shape)
    _add_label_outputs(config, bundle)
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    config.dynamic_batching.max_queue_delay_microseconds = 0
    return config


def answers_labels(config: Any) -> bool:
    """Return whether a model of a repository answers with labels instead of logits or features."""
    return any(output.name == _LABEL for output in config.output)


def _add_label_outputs(config: Any, bundle: Bundle) -> None:
    types = {_LABEL: "TYPE_STRING", "probability": "TYPE_FP32", "index": "TYPE_INT32"}
    if bundle.manifest.task == "multi-label":
        types["present"] = "TYPE_BOOL"
    for name, data_type in types.items():
        config.output.add(name=name, data_type=data_type, dims=[-1])  # the number of labels depends on the request
