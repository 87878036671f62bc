"""Build the ``config.pbtxt`` files of the two models that answer with labels.

<name>_labels    logits → label, probability, index; for a multi-label network also present
<name>_classify  ensemble of preprocessing, network and <name>_labels: IMAGE (encoded bytes) → the outputs of the latter

Triton 2.51 waits for ever when a client asks an ensemble only for outputs of its last model, while the ensemble also
has an output that the last model reads. So the logits and the labels are outputs of two ensembles.
"""

from __future__ import annotations

from typing import Any

_LABEL, _LOGITS = "label", "logits"


def labels_config(ensemble: Any, name: str, *, multi_label: bool) -> Any:
    """Return the configuration of the model that turns logits into labels.

    ensemble: the configuration of the ensemble from images to logits.
    """
    (logits,) = [output for output in ensemble.output if output.name == _LOGITS]
    config = type(ensemble)(name=name, backend="python", max_batch_size=ensemble.max_batch_size)
    for key in (
        "gmmvit_bundle_sha256",
        "gmmvit_checkpoint_sha256",
        "gmmvit_labels",
        "gmmvit_task",
        "gmmvit_thresholds",
    ):
        config.parameters[key].CopyFrom(ensemble.parameters[key])
    config.input.add(name=_LOGITS, data_type=logits.data_type, dims=logits.dims)
    _add_outputs(config, multi_label=multi_label)
    config.instance_group.add(count=1, kind="KIND_CPU")
    config.dynamic_batching.max_queue_delay_microseconds = 0
    return config


def classify_config(ensemble: Any, name: str, *, labels: str, multi_label: bool) -> Any:
    """Return the configuration of the ensemble that answers images with labels.

    ensemble: the configuration of the ensemble from images to logits.
    labels: the name of the model of `labels_config`.
    """
    config = type(ensemble)()
    config.CopyFrom(ensemble)
    config.name = name
    del config.output[:]
    _add_outputs(config, multi_label=multi_label)
    network = config.ensemble_scheduling.step[-1]
    network.output_map.clear()
    network.output_map[_LOGITS] = _LOGITS
    last = config.ensemble_scheduling.step.add(model_name=labels, model_version=-1)
    last.input_map[_LOGITS] = _LOGITS
    for output in config.output:
        last.output_map[output.name] = output.name
    return config


def answers_labels(config: Any) -> bool:
    """Return whether a model of a repository answers with labels instead of logits or features."""
    return any(output.name == _LABEL for output in config.output)


def _add_outputs(config: Any, *, multi_label: bool) -> None:
    types = {_LABEL: "TYPE_STRING", "probability": "TYPE_FP32", "index": "TYPE_INT32"}
    if multi_label:
        types["present"] = "TYPE_BOOL"
    for name, data_type in types.items():
        config.output.add(name=name, data_type=data_type, dims=[-1])  # the number of labels depends on the request
