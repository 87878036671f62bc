"""Build the network of a spec with Hugging Face transformers, and translate the names of tensors.

Nothing is downloaded, and no code outside transformers runs: fields of the configuration with which transformers would
do either are refused.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import MissingDependencyError, SpecError
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.models.sources.source import HEAD_FILE

if TYPE_CHECKING:
    from torch import nn


_SUFFIXES = ("ForImageClassification", "ForImageClassificationWithTeacher")
IMAGES_AND_TEXTS = ("CLIPModel", "SiglipModel")
"""Classes with an image tower and a text tower; their classes are texts, as ``--prompt`` states."""
_TOWERS = ("CLIPVisionModel", "CLIPVisionModelWithProjection")
"""Backbones that transformers' table of networks of images lacks."""
_REFUSED = {
    "auto_map": "it names code in the folder, and gmmvit runs only code of transformers",
    "backbone": "transformers would build a backbone of another library, and could download it",
    "pruned_heads": "transformers removes heads only while it loads a model",
    "quantization_config": "the weights are quantised, and gmmvit reads those of a float model",
    "use_pretrained_backbone": "transformers would download a backbone",
    "use_timm_backbone": "transformers would build a backbone with timm",
}
"""Fields of ``config.json`` that are refused, if they have a true or non-empty value → the reason."""
_NOT_THE_NETWORK = {
    "_attn_implementation", "_commit_hash", "_name_or_path", "_num_labels", "architectures", "attn_implementation",
    "chunk_size_feed_forward", "dtype", "finetuning_task", "gradient_checkpointing", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "task_specific_params", "torch_dtype",
    "torchscript", "transformers_version", "use_bfloat16", "use_return_dict",
}  # fmt: skip
"""Fields of ``config.json`` that do not change the logits: labels, versions, and settings of a run."""


def require_transformers() -> Any:
    """Import transformers.  Errors: MissingDependencyError when transformers is not installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported
    try:
        import transformers
    except ImportError as exc:
        raise MissingDependencyError("transformers, which builds this model,", extra="transformers") from exc
    return transformers


def of_images_and_texts(config: Mapping[str, Any]) -> bool:
    """Return True if ``config.json`` states one of the classes of `IMAGES_AND_TEXTS`."""
    return config.get("architectures") in [[name] for name in IMAGES_AND_TEXTS]


def is_backbone(name: str) -> bool:
    """Return True if transformers has a network of images without a classifier with this name, such as ``ViTModel``."""
    require_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_MAPPING_NAMES as CLASSES

    return name in (*_names(CLASSES), *_TOWERS) and not name.endswith(_SUFFIXES)


def _names(classes: Mapping[str, str | tuple[str, ...]]) -> list[str]:
    """Return the names of a table of transformers: kind of model → class, or several classes."""
    return [name for names in classes.values() for name in ([names] if isinstance(names, str) else names)]


def class_named(name: str, *, where: str) -> Any:
    """Return the class of transformers with this name, for image classification or a backbone of images, or SpecError.

    where: the file that holds the name, for messages.
    """
    transformers = require_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    known = _names(CLASSES)
    if name.startswith("TimmWrapper"):
        raise SpecError(
            f"{where}: {name} is a model of timm inside transformers",
            hint="give the weights of the folder, and type --model with timm's name of the architecture",
        )
    if name.startswith("Siglip2"):
        raise SpecError(
            f"{where}: {name} cuts images of any size into patches (NaFlex); expected a network that reads images of "
            "one size",
            hint="give the folder of a SigLIP 2 of fixed resolution, whose class is SiglipModel",
        )
    if not (name in known and name.endswith(_SUFFIXES)) and not is_backbone(name) and name not in IMAGES_AND_TEXTS:
        close = difflib.get_close_matches(name, known, n=3) or ["ViTForImageClassification"]
        raise SpecError(
            f"{where}: transformers {transformers.__version__} has no classifier or backbone of images {name!r}",
            hint=f"give the folder of a classifier, such as {', '.join(close)}, or of a backbone, such as ViTModel",
        )
    return getattr(transformers, name)


def network_config(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the fields of ``config.json`` that describe the network, with the number of classes as ``num_labels``.

    Errors: SpecError when a refused field has a true or non-empty value.
    """
    folder = where.rpartition("/")[0]
    for name, reason in _REFUSED.items():
        if config.get(name):
            hint = _dequantised(config, folder) if name == "quantization_config" else _state_dict_hint(folder)
            raise SpecError(f"{where}: the field {name} is not supported: {reason}", hint=hint)
    kept = {name: value for name, value in config.items() if name not in _NOT_THE_NETWORK | _REFUSED.keys()}
    labels = config.get("id2label")
    return {**kept, "num_labels": len(labels)} if isinstance(labels, Mapping) and labels else kept


def _state_dict_hint(folder: str) -> str:
    loaded = f"t.AutoModelForImageClassification.from_pretrained('{folder}', trust_remote_code=True)"
    return (
        f"type python -c \"import torch, transformers as t; torch.save({loaded}.state_dict(), 'weights.pth')\", which "
        "runs the code in the folder; then give weights.pth, and type --model FILE.py:CLASS with a class that builds "
        "the same network"
    )


def _dequantised(config: Mapping[str, Any], folder: str) -> str:
    """Return what to do with quantised weights: the line for the quantisations that transformers can undo."""
    transformers = require_transformers()
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.base import HfQuantizer

    before = "give the folder of the model before the quantisation"
    stated = config["quantization_config"]
    # Files of older transformers state only load_in_8bit or load_in_4bit, which are options of bitsandbytes.
    method = str(stated.get("quant_method") or "bitsandbytes") if isinstance(stated, Mapping) else ""
    quantizer = AUTO_QUANTIZER_MAPPING.get(method) or AUTO_QUANTIZER_MAPPING.get(f"{method}_8bit")
    if quantizer is None or quantizer._dequantize is HfQuantizer._dequantize:
        return f"{before}; transformers {transformers.__version__} cannot undo the quantisation {method}"
    (architecture, *_) = config.get("architectures") or ("AutoModelForImageClassification",)
    out = f"{folder}-float32"
    return (
        f'{before}, which is more exact; or, where the quantised model runs, type python -c "import transformers as t; '
        f"t.{architecture}.from_pretrained('{folder}').dequantize().save_pretrained('{out}'); "
        f"t.AutoImageProcessor.from_pretrained('{folder}').save_pretrained('{out}')\", then give {out}"
    )


def config_of(architecture: str, config: Mapping[str, Any], *, where: str) -> Any:
    """Return the configuration of transformers for the fields of ``config.json``, or SpecError."""
    model_class = class_named(architecture, where=where)
    stated, own = config.get("model_type"), model_class.config_class.model_type
    if stated is not None and stated != own:
        raise SpecError(
            f"{where}: model_type {stated!r} and {architecture} contradict each other; expected model_type {own!r}",
            hint="correct architectures or model_type",
        )
    try:
        return model_class.config_class.from_dict(network_config(config, where=where))
    except SpecError:
        raise
    # The fields come from a file; transformers checks them with exceptions of several libraries.
    except Exception as exc:
        raise _cannot_build(architecture, where, exc) from exc


def network_from_spec(spec: HuggingFaceSpec) -> nn.Module:
    """Build the network of a spec with random weights, in evaluation mode, or SpecError."""
    if spec.prompts:
        from gmmvit_deploy.models.families.hugging_face.towers import ZeroShotNetwork

        config = config_of(spec.architecture, spec.config, where="config.json")
        return ZeroShotNetwork(config, spec.classes).eval()
    backbone = backbone_from_spec(spec)
    if not spec.head_features:
        return backbone
    from gmmvit_deploy.models.families.hugging_face.towers import BackboneWithHead

    return BackboneWithHead(backbone, spec).eval()


def backbone_from_spec(spec: HuggingFaceSpec) -> nn.Module:
    """Build transformers' own network of a spec without ``prompts``, without the linear layer of ``--head``."""
    where = "config.json"
    config = config_of(spec.architecture, spec.config, where=where)
    if spec.architecture in IMAGES_AND_TEXTS:
        from gmmvit_deploy.models.families.hugging_face.towers import ImageTower

        return ImageTower(config).eval()
    model_class = class_named(spec.architecture, where=where)
    takes_pooler = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    arguments = {"add_pooling_layer": False} if takes_pooler and spec.pool == "cls" else {}
    try:
        network: nn.Module = model_class(config, **arguments)
    # transformers checks few of the values before it builds the modules.
    except Exception as exc:
        raise _cannot_build(spec.architecture, where, exc) from exc
    return network.eval()


def _cannot_build(architecture: str, where: str, exc: Exception) -> SpecError:
    reason = " ".join(str(exc).split())
    return SpecError(
        f"{where}: transformers cannot build {architecture} from these fields: {type(exc).__name__}: {reason}",
        hint="copy or download config.json again",
    )


def names_in_network(spec: HuggingFaceSpec, names: Iterable[str]) -> Mapping[str, str | None]:
    """Map each name in a file to the name in the network of a spec (`translated_names`)."""
    import torch

    if spec.prompts:  # `checkpoints._zero_shot` has translated them
        return {name: name for name in names}
    with torch.device("meta"):
        if spec.architecture not in IMAGES_AND_TEXTS:
            return translated_names(backbone_from_spec(spec), names)
        from gmmvit_deploy.models.families.hugging_face.towers import TENSORS

        config = config_of(spec.architecture, spec.config, where="config.json")
        whole = translated_names(class_named(spec.architecture, where="config.json")(config), names)
    return {old: new if new and new.startswith((*TENSORS, HEAD_FILE)) else None for old, new in whole.items()}


def translated_names(network: Any, names: Iterable[str]) -> Mapping[str, str | None]:
    """Map each name in a file to the name in the network, as transformers does when it loads the file.

    A name that transformers does not know is mapped to itself, and one that it knows to be unused to None.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state = network.state_dict()
    transforms = get_model_conversion_mapping(network)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    unused = [re.compile(pattern) for pattern in network._keys_to_ignore_on_load_unexpected or ()]
    # Older files of CLIP and SigLIP hold position_ids, which the network now computes.
    computed = {name for name, _ in network.named_buffers()} - state.keys()
    translated: dict[str, str | None] = {}
    for name in names:
        new, pattern = rename_source_key(name, renamings, converters, network.base_model_prefix, state)
        if new not in state:
            new, pattern = rename_source_key(name, [], [], network.base_model_prefix, state)
        if new in state and pattern is None:
            translated[name] = new
        else:
            is_unused = new in computed or any(p.search(new) or p.search(name) for p in unused)
            translated[name] = None if is_unused else name
    return translated
