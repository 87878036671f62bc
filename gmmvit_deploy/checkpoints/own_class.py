"""Read the file of ``--model FILE.py:CLASS``, allow this process to run the file, and load a checkpoint into the class.

Only this module calls `families.custom.permit`. The bytes that are hashed are the bytes that run.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gmmvit_deploy.checkpoints._wrapping import must_choose, names_without_prefix
from gmmvit_deploy.checkpoints.reading import TensorFile, under_prefix
from gmmvit_deploy.checkpoints.weights import filled_model, listed, misfits, without_training
from gmmvit_deploy.errors import CheckpointError, InputError
from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.models.families.custom import CustomSpec, OwnFile, permit
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.sources.hints import LoadHints, own_class_of, require_own_class
from gmmvit_deploy.models.sources.shapes import asked_image
from gmmvit_deploy.models.specs import MaskSpec, ModelSpec, input_shape

if TYPE_CHECKING:
    from torch import nn


def _read(path: str) -> OwnFile:
    try:
        source = Path(path).read_bytes()
    except OSError as exc:
        raise InputError(
            f"--model {path}: cannot be read: {exc.strerror}", hint="type --model with the path of a Python file"
        ) from exc
    packages = itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), Path(path).absolute().parents)
    package = ".".join(reversed([folder.name for folder in packages]))
    return OwnFile(path=path, sha256=sha256_of_bytes(source), source=source, package=package)


def permit_class_of(spec: ModelSpec, model: str, *, what: str) -> None:
    """Allow this process to run the file that ``model`` names, if the file has the SHA-256 of the spec.  No code runs.

    spec, what: of a bundle or of a weights file.  model: ``FILE.py:CLASS``, as the user typed it.
    Errors: InputError when ``model`` names no file and class, or the spec is that of another class or file.
    """
    named = own_class_of(model)
    if named is None:
        raise InputError(f"--model: expected FILE.py:CLASS, got {model!r}", hint="type --model FILE.py:CLASS")
    if not isinstance(spec, CustomSpec):
        raise InputError(
            f"--model {model}: the model of {what} has the family {spec.family}, whose code is part of gmmvit-deploy",
            hint="leave --model out",
        )
    path, name = named
    file = _read(path)
    if file.sha256 != spec.code_sha256:
        raise InputError(
            f"{path}: the file differs from the file that {what} was exported with: expected the SHA-256 "
            f"{spec.code_sha256}, got {file.sha256}",
            hint=f"type --model with the unchanged file {spec.code_file}, or export the checkpoint again with {path}",
        )
    if name != spec.class_name:
        raise InputError(
            f"--model {model}: {what} was exported with the class {spec.class_name}",
            hint=f"type --model {path}:{spec.class_name}",
        )
    permit(file)


def require_same_class(spec: ModelSpec, hints: LoadHints, *, what: str) -> None:
    """Permit the file of ``--model``.  Errors: InputError when it, or ``--model-args``, does not fit the spec."""
    if hints.model is not None:
        permit_class_of(spec, hints.model, what=what)
    if hints.model_args and isinstance(spec, CustomSpec) and dict(hints.model_args) != dict(spec.model_args):
        raise InputError(
            f"--model-args {dict(hints.model_args)}: {what} was exported with {dict(spec.model_args)}",
            hint="leave --model-args out",
        )


def refuse_own_options(path: str, hints: LoadHints, *, reason: str, allowed: tuple[str, ...] = ()) -> None:
    """Errors: CheckpointError when the user typed an option for what a file without a source states itself.

    reason: the end of the message.  allowed: the fields of `LoadHints` that apply nevertheless.
    """
    typed_source = {} if hints.source is None else {"source": f"--set source={hints.source}"}
    for hint, typed in (*hints.own().items(), *typed_source.items()):
        if hint not in allowed:
            raise CheckpointError(
                f"{path}: {typed} does not apply to {reason}", hint=f"leave {typed.partition('=')[0]} out"
            )


def load_own_class(file: TensorFile, hints: LoadHints, path: str, name: str) -> tuple[Model, set[str], TensorFile]:
    """Build a network of the class that the user named, and load the tensors of a checkpoint into the network.

    path, name: the Python file and the class of ``hints.model``.
    Returns (the model, the keys of the checkpoint that the model reads, the file without what is beside the network).
    Errors: InputError when the class cannot be used; CheckpointError when an option is missing or does not apply, or
    the tensors do not fit the class.
    """
    from gmmvit_deploy.models.families.custom.model import classes_of, network_of_class

    source = str(file.path)
    require_own_class(hints, path, name)
    image_size, channels = asked_image(source, hints, example="--image-size 32 --set channels=3")
    own_file = _read(path)
    permit(own_file)
    network = network_of_class(own_file, name, hints.model_args)
    spec = CustomSpec(
        image_size=image_size,
        channels=channels,
        classes=classes_of(own_file, name, network, (channels, image_size, image_size)),
        mask=MaskSpec(),
        code_file=Path(path).name,
        class_name=name,
        code_sha256=own_file.sha256,
        model_args=dict(hints.model_args),
    )
    # A wrapper's prefix is removed from the names of the file; a class whose names all begin with it loses it too.
    names = names_without_prefix(network.state_dict()).names
    file = without_training(_network_of(file, names.values()), names.values())
    origins: Mapping[str, str] = {f"network.{own}": key for own, key in names.items()}
    if problems := misfits(spec, file.tensors, origins):
        raise CheckpointError(
            f"{source}: {len(problems)} keys do not fit the class {name} of {path}:{listed(problems)}",
            hint="type --model and --model-args with the class and the arguments of training; gmmvit neither fills in "
            "missing tensors nor ignores unknown tensors",
        )
    model = filled_model(spec, {own: file.tensors[key] for own, key in origins.items()})
    state = {own: file.tensors[key] for own, key in names.items()}
    networks = (network, network_of_class(own_file, name, hints.model_args))
    for own_network in networks:
        own_network.load_state_dict(state)
    _require_same_logits(networks, model, what=f"{source}: the class {name} of {path}")
    return model, set(names.values()), file


def _network_of(file: TensorFile, names: Collection[str]) -> TensorFile:
    """Return the tensors under the only prefix, such as ``net.``, under which the file has every name of the class."""
    first = next(iter(names), "")
    prefixes = [key.removesuffix(first) for key in file.tensors if key == first or key.endswith(f".{first}")]
    fitting = [prefix for prefix in prefixes if all(f"{prefix}{name}" in file.tensors for name in names)]
    if not fitting or "" in fitting:
        return file
    if len(fitting) > 1:
        keys = [prefix.removesuffix(".") for prefix in fitting]
        raise must_choose(file.path, f"every tensor of the class under {' and under '.join(fitting)}", keys)
    return under_prefix(file, fitting[0])


def _require_same_logits(networks: tuple[nn.Module, nn.Module], model: Model, *, what: str) -> None:
    """Errors: CheckpointError when two networks of the class, or the model with our attentions, differ in float64."""
    import torch

    images = torch.randn(2, *input_shape(model.spec), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), contextlib.redirect_stdout(sys.stderr):
        expected, again = (network.double().eval()(images) for network in networks)
        logits = copy.deepcopy(model).double()(images)
    if not torch.allclose(again, expected, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise CheckpointError(
            f"{what}: two networks of the class with the weights of the checkpoint give different logits, because the "
            "class holds random values that the checkpoint does not hold",
            hint="in the class, register these values with register_buffer, and save the checkpoint again; without the "
            "values of training, the predictions are wrong",
        )
    if not torch.allclose(logits, expected, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise CheckpointError(
            f"{what}: the logits change by {float((logits - expected).abs().max()):.3g} when gmmvit computes the "
            "attention in place of PyTorch's fused attention function; expected no change",
            hint="write the attention as softmax(Q Kᵀ · scale) V, without F.scaled_dot_product_attention",
        )
