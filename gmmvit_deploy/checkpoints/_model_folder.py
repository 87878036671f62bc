"""Read a model folder, as the Hugging Face hub stores it: of timm (``save_for_hf``) or of transformers; add a head.

model.safetensors or pytorch_model.bin      the weights
model.safetensors.index.json or             transformers: the names of several files with parts of the weights
pytorch_model.bin.index.json
config.json                                 timm: architecture, model_args, pretrained_cfg, label_names
                                            transformers: architectures, model_type, id2label
preprocessor_config.json, or                transformers: the preprocessing
processor_config.json                       transformers 5: the same under image_processor

The file of ``--head`` holds a linear classifier. A backbone of DINOv2 is recognised by the names of its tensors.

DINO's eval_linear.py    {"state_dict": {"module.linear.weight": …, "module.linear.bias": …}}
DINOv2, torch.nn.Linear  {"weight": …, "bias": …}, also with a prefix such as ``linear.``
scikit-learn             an .npz file with ``coef_`` (C, D) and ``intercept_`` (C), or for two classes (1, D) and (1)
DINOv2, DINOv3           {"linear_classifiers": {"module.classifiers_dict.NAME.linear.weight": …}}: eval/linear.py
                         trains many classifiers, NAME is classifier_{blocks}_blocks_avgpool_{True or False}_lr_{rate}
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmmvit_deploy.checkpoints._other_files import refuse_folder
from gmmvit_deploy.checkpoints._wrapping import names_without_prefix
from gmmvit_deploy.checkpoints.reading import INDEX_FILES, WEIGHTS_FILES, TensorFile, read_tensors, with_shared
from gmmvit_deploy.errors import READABLE_HINT, CheckpointError
from gmmvit_deploy.files.writing import sha256_of_bytes, sha256_of_file
from gmmvit_deploy.models.families.hugging_face.checkpoint import CONFIG_FILE
from gmmvit_deploy.models.families.hugging_face.images import PREPROCESSOR_FILE, PROCESSOR_FILE
from gmmvit_deploy.models.families.hugging_face.network import names_in_network
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.models.families.timm.checkpoint import DINOV2_FILES
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.source import HEAD_FILE

if TYPE_CHECKING:
    from torch import Tensor

_MAX_JSON_BYTES = 2**24
_DINO = "linear."
"""The prefix in files of DINO's eval_linear.py, whose features interleave class token and mean of the patches."""
_CLASSIFIER = re.compile(r"(?:.+\.)?(classifier_(\d+)_blocks_avgpool_(True|False)_[^.]+)\.")
"""The name of a classifier of eval/linear.py of DINOv2 and DINOv3 in the name of a tensor."""
_INDEX_HINT = "copy or download the folder again, with all parts of the weights"
_OF_TRANSFORMERS = ("architectures", "model_type")
_HINT = (
    "copy or download config.json again; without config.json, give the file of the weights, and type --model and "
    "--model-args"
)


def read_checkpoint(path: Path, weights: str | None = None) -> TensorFile:
    """Read a checkpoint file (`read_tensors`), the index of its parts, or a model folder of timm or of transformers.

    Errors: CheckpointError as in `read_tensors`, and when an index, its parts or ``config.json`` is not valid.
    """
    if path.name.endswith(".index.json"):
        return _read_parts(path, weights)
    if not path.is_dir():
        return read_tensors(path, weights)
    present = [path / name for name in (*WEIGHTS_FILES, *INDEX_FILES) if (path / name).is_file()]
    if not present or not (path / CONFIG_FILE).is_file():
        refuse_folder(path)
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "no file"
        raise CheckpointError(
            f"{path}: expected a checkpoint file, or a model folder of timm or of Hugging Face transformers with "
            f"{CONFIG_FILE} and {' or '.join(WEIGHTS_FILES)}; the folder holds {held}",
            hint=f"copy the missing file into the folder; without {CONFIG_FILE}, give the file of the weights, and "
            "type --model and --model-args",
        )
    config = _json_object(path / CONFIG_FILE, hint=_HINT)
    of_transformers = "architecture" not in config and any(key in config for key in _OF_TRANSFORMERS)
    if not of_transformers:
        _check_timm(path / CONFIG_FILE, config)
    file = _read_parts(present[0], weights) if present[0].name in INDEX_FILES else read_tensors(present[0], weights)
    preprocessor, preprocessor_file = _preprocessor(path) if of_transformers else (None, "")
    writer = "Hugging Face transformers" if of_transformers else "timm"
    return replace(
        file,
        wrapping=f"model folder of {writer}, {file.wrapping}",
        record=replace(
            file.record,
            config=config,
            of_transformers=of_transformers,
            preprocessor=preprocessor,
            preprocessor_file=preprocessor_file,
        ),
    )


def _preprocessor(folder: Path) -> tuple[Mapping[str, Any] | None, str]:
    """Return (the values of the image processor, the name of their file), in the order of transformers."""
    for name in (PROCESSOR_FILE, PREPROCESSOR_FILE):
        if (folder / name).is_file():
            content = _json_object(folder / name, hint=f"copy or download {name} again")
            stated = content.get("image_processor") if name == PROCESSOR_FILE else content
            if isinstance(stated, dict):
                return stated, name
    return None, ""


def _check_timm(path: Path, config: Mapping[str, Any]) -> None:
    if not isinstance(config.get("architecture"), str) or not config["architecture"]:
        raise CheckpointError(
            f"{path}: expected a JSON object with the name of the architecture under 'architecture' (timm) or "
            "'architectures' (Hugging Face transformers)",
            hint=_HINT,
        )
    for key in ("model_args", "pretrained_cfg"):
        if not isinstance(config.get(key), dict | None):
            raise CheckpointError(
                f"{path}: expected an object under '{key}', got {type(config[key]).__name__}", hint=_HINT
            )


def _read_parts(index: Path, weights: str | None = None) -> TensorFile:
    """Read the parts that an index names.  SHA-256: of a text with a line ``SHA-256  name`` for each, by name."""
    stated = _json_object(index, hint=_INDEX_HINT)
    placed, metadata = stated.get("weight_map"), stated.get("metadata")
    if not isinstance(placed, dict) or not placed or not all(isinstance(part, str) for part in placed.values()):
        raise CheckpointError(f"{index}: expected an object under 'weight_map': tensor → file", hint=_INDEX_HINT)
    tensors: dict[str, Tensor] = {}
    hashes: list[str] = []
    for name in sorted({*placed.values()}):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index}: names the part {name!r}; expected a file in the same folder", hint=_INDEX_HINT
            )
        part = read_tensors(index.parent / name, weights, keep_prefix=True)
        own = {tensor for tensor, file in placed.items() if file == name}
        if differing := sorted((own ^ part.tensors.keys()) - part.metadata.keys()):
            raise CheckpointError(
                f"{index.parent / name}: the index {index.name} and this part differ in the tensor {differing[0]}",
                hint=_INDEX_HINT,
            )
        tensors |= part.tensors
        hashes.append(f"{part.sha256}  {name}\n")
    tensors = with_shared(tensors, metadata if isinstance(metadata, dict) else {})
    plain = names_without_prefix(tensors)
    return TensorFile(
        path=index.parent,
        sha256=sha256_of_bytes("".join(hashes).encode()),
        wrapping=f"{len(hashes)} parts, {part.wrapping}",
        tensors={short: tensors[name] for name, short in plain.names.items()},
        metadata={},
        weights=part.weights,
        left_out=plain.left_out,
    )


def _json_object(path: Path, *, hint: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: the file has more than {_MAX_JSON_BYTES} bytes", hint=hint)
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror}", hint=READABLE_HINT) from exc
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: expected JSON: {exc}", hint=hint) from exc
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}", hint=hint)
    return data


def with_network_names(file: TensorFile, spec: HuggingFaceSpec) -> TensorFile:
    """Return the file with the names of the tensors in the network, without the tensors that are known to be unused.

    Errors: CheckpointError when two tensors have the same name in the network.
    """
    names = names_in_network(spec, file.tensors)
    tensors: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for old, new in names.items():
        if new is None:
            continue
        if new in tensors:
            raise CheckpointError(
                f"{file.path}: the tensors {origins[new]} and {old} are the same tensor {new} of the network",
                hint="save the model again with save_pretrained",
            )
        tensors[new], origins[new] = file.tensors[old], old
    reason = "transformers computes this tensor, or does not read it"
    unused: Mapping[str, str] = {old: reason for old, new in names.items() if new is None}
    return replace(file, tensors=tensors, left_out={**file.left_out, **unused})


def with_linear_head(file: TensorFile, path: Path, hints: LoadHints) -> tuple[TensorFile, LoadHints]:
    """Return ``file`` with the tensors of the linear classifier in ``path``, under the prefix `HEAD_FILE`.

    Also returns the hints with the features that the name of the classifier states.
    Errors: CheckpointError when the file holds no linear layer, or the user must name one or its features.
    """
    head, stated = _chosen_classifier(_read_head(path), path, hints)
    for name, value in stated.items():
        if getattr(hints, name) not in (None, value):
            raise CheckpointError(
                f"{path}: {hints.typed()[name]}, but the classifier {hints.head_name} states another value",
                hint=f"leave --set {name} out",
            )
    hints = replace(hints, **stated)
    of_transformers = file.record.of_transformers
    if of_transformers and (hints.head_blocks not in (None, 1) or hints.head_average):
        raise CheckpointError(
            f"{path}: the head reads the class tokens of {hints.head_blocks} blocks"
            f"{' and the mean of the patches' if hints.head_average else ''}, but behind a backbone of Hugging Face "
            "transformers it reads the features alone",
            hint="give a linear layer that was trained on the features that --outputs features writes, and leave --set "
            "head_blocks and --set head_average out",
        )
    if hints.head_blocks is None and not of_transformers:
        raise CheckpointError(
            f"{path}: expected the number of blocks whose class tokens the head reads",
            hint="add --set head_blocks=N; DINO's evaluation uses 4 for ViT-S and 1 for ViT-B",
        )
    by_part = {name.rpartition(".")[2]: name for name in head.tensors}
    weight, bias = (head.tensors.get(by_part.get(part, "")) for part in ("weight", "bias"))
    if len(head.tensors) != 2 or weight is None or bias is None or weight.dim() != 2 or bias.dim() != 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in list(head.tensors.items())[:4])
        raise CheckpointError(
            f"{path}: expected the weight (classes, features) and the bias (classes) of a linear layer, got {shapes}",
            hint="give a state dict of torch.nn.Linear, an .npz file with coef_ and intercept_ of scikit-learn, or the "
            "file that eval_linear.py of DINO writes",
        )
    added = {f"{HEAD_FILE}.weight": weight, f"{HEAD_FILE}.bias": bias}
    interleaved = not stated and by_part["weight"].startswith(_DINO) and not DINOV2_FILES.recognises(file.tensors)
    # In a backbone of transformers, layers of this name, such as SigLIP's pooling, belong to the features.
    own = {n: tensor for n, tensor in file.tensors.items() if of_transformers or not n.startswith("head.")}
    replaced = "the backbone's own head, which the linear head of --head replaces"
    dropped = dict.fromkeys(sorted(file.tensors.keys() - own.keys()), replaced)
    what = f"linear head {f'{hints.head_name} of ' if stated else ''}{path.name}"
    return replace(
        file,
        tensors=own | added,
        wrapping=f"{file.wrapping}; {what} (SHA-256 {head.sha256})",
        record=replace(file.record, interleaved_head=interleaved),
        left_out={**file.left_out, **dropped},
    ), hints


def _read_head(path: Path) -> TensorFile:
    """Read the file of ``--head``: a checkpoint, or the arrays of a linear classifier of scikit-learn.

    scikit-learn stores a single row for two classes: the logit of the second, where that of the first is 0.
    """
    import numpy as np
    import torch

    if path.suffix != ".npz":
        return read_tensors(path)
    hint = "type in Python: numpy.savez(FILE, coef_=classifier.coef_, intercept_=classifier.intercept_)"
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile) as exc:
        raise CheckpointError(f"{path}: expected an .npz file of numpy: {exc}", hint=hint) from exc
    shapes = {name: array.shape for name, array in arrays.items()}
    rows, features = shapes["coef_"] if len(shapes.get("coef_", ())) == 2 else (0, 0)
    if rows * features == 0 or shapes != {"coef_": (rows, features), "intercept_": (rows,)}:
        found = ", ".join(f"{name} {shape}" for name, shape in list(shapes.items())[:4])
        raise CheckpointError(
            f"{path}: expected coef_ (classes, features) and intercept_ (classes) of scikit-learn, got {found}",
            hint=hint,
        )
    coef, intercept = arrays["coef_"], arrays["intercept_"]
    first = np.zeros((1 if rows == 1 else 0, features))
    tensors = {"weight": np.concatenate([first, coef]), "bias": np.concatenate([first[:, 0], intercept])}
    return TensorFile(
        path=path,
        sha256=sha256_of_file(path),
        wrapping="arrays of scikit-learn",
        tensors={name: torch.from_numpy(array.astype(np.float32)) for name, array in tensors.items()},
        metadata={},
    )


def _chosen_classifier(head: TensorFile, path: Path, hints: LoadHints) -> tuple[TensorFile, dict[str, Any]]:
    """Return the tensors of the classifier ``hints.head_name``, or the only one, and the hints that its name states."""
    names = {match[1]: match for key in head.tensors if (match := _CLASSIFIER.match(key))}
    asked = next(iter(names)) if len(names) == 1 and hints.head_name is None else hints.head_name or ""
    chosen = names.get(asked)
    if chosen is not None:
        own = {key: tensor for key, tensor in head.tensors.items() if f".{asked}." in f".{key}"}
        stated = {"head_blocks": int(chosen[2]), "head_average": chosen[3] == "True"}
        return replace(head, tensors=own), stated
    if names:
        raise CheckpointError(
            f"{path}: holds {len(names)} linear classifiers: {', '.join(names)}"
            + (f"; got --set head_name={hints.head_name}" if hints.head_name else ""),
            hint=f"add --set head_name=NAME with the classifier that was best in the evaluation, such as --set "
            f"head_name={next(iter(names))}; its name states head_blocks and head_average",
        )
    if hints.head_name is not None:
        raise CheckpointError(
            f"{path}: --set head_name={hints.head_name}, but the file holds no classifiers with names",
            hint="leave --set head_name out",
        )
    return head, {}
