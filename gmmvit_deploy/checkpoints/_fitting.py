"""Find the names under which every tensor of a file fits the architecture: those of the file, or those that older code
or a new classifier replaced.

1. the names of the file
2. the present names, if the source knows older ones (`CheckpointSource.present_names`)
3. as 2, with the only linear layer that is in the place of the classifier under the classifier's name, such as
   ``head.1`` for ``head`` after ``model.head = Sequential(Dropout(), Linear(…))``
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile

from gmmvit_deploy.checkpoints._model_folder import with_network_names
from gmmvit_deploy.checkpoints._wrapping import CLASSIFIER, of_training
from gmmvit_deploy.checkpoints.reading import TensorFile
from gmmvit_deploy.checkpoints.weights import listed, misfits, tensors_of, without_training
from gmmvit_deploy.errors import CheckpointError, InputError, SpecError
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.models.sources.shapes import MissingTensorError, Shapes
from gmmvit_deploy.models.sources.source import CheckpointSource, TensorOrigins, origin_keys
from gmmvit_deploy.models.specs import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedFile:
    """A file whose tensors all fit an architecture.

    file: the file, with the names of the tensors that ``origins`` has.  unused: key → why the network never reads it.
    taken_from: what was done to the names of the tensors, as in `loading.LoadedCheckpoint`.
    """

    file: TensorFile
    shapes: Shapes
    spec: ModelSpec
    origins: TensorOrigins
    unused: dict[str, str]
    taken_from: dict[str, str] = field(default_factory=dict)


def fitted_file(
    file: TensorFile, name: str, source: CheckpointSource, hints: LoadHints, check: Callable[[ModelSpec], None]
) -> FittedFile:
    """Return the file with the names under which all tensors fit.

    name: the path that the user typed.  check: compares the spec with the user's options.
    Errors: CheckpointError and SpecError of ``source`` and of ``check``; CheckpointError when tensors do not fit.
    """

    def fit(file: TensorFile) -> FittedFile:
        return _fitted(file, name, source, hints, check)

    taken: dict[str, str] = {}
    try:
        return fit(file)
    except InputError as exc:
        error = exc
    renamed = source.present_names(_shapes(file, name, hints), hints)
    if renamed is not None:
        file = replace(file, tensors=dict(renamed))
        taken = {"names of tensors": f"the present ones of {source.name}, in place of older ones in the file"}
        try:
            return replace(fit(file), taken_from=taken)
        except InputError as exc:
            error = exc
    missing = error.names if isinstance(error, MissingTensorError) else ()
    layers = [name.removesuffix(".weight") for name in missing if CLASSIFIER.fullmatch(name)]
    if not layers:
        raise error
    anywhere = CLASSIFIER.pattern.removesuffix(r"\.weight") + "$"
    own = _linear_layers(file, rf"{layers[0].partition('.')[0]}(\.|$)")
    inside = own or _linear_layers(file, anywhere)
    fitting = []
    for layer in inside:
        try:
            fitting.append(replace(fit(_with_classifier(file, layer, layers)), taken_from=taken | _note(layer, layers)))
        except InputError as exc:
            error = exc if len(inside) == 1 and isinstance(exc, MissingTensorError) else error
    if len(fitting) == 1:
        return fitting[0]
    if len(own) == 1 or not inside:
        raise error
    shapes = ", ".join(f"{layer}.weight {tuple(file.tensors[f'{layer}.weight'].shape)}" for layer in inside)
    raise CheckpointError(
        f"{file.path}: the network has the classifier {layers[0]}, but the file has {shapes} in its place",
        hint="type --model FILE.py:CLASS with a class that builds the network and its classifier as training did, and "
        "--image-size and --set channels with its images; the page 'timm' of the documentation shows such a class",
    ) from error


def _linear_layers(file: TensorFile, pattern: str) -> list[str]:
    weights = [name for name, tensor in file.tensors.items() if name.endswith(".weight") and tensor.dim() == 2]
    layers = [name.removesuffix(".weight") for name in weights if f"{name.removesuffix('weight')}bias" in file.tensors]
    return [layer for layer in layers if re.match(pattern, layer)]


def _with_classifier(file: TensorFile, layer: str, classifiers: list[str]) -> TensorFile:
    """Return the file with the layer as the first classifier, and its like as others: ``head.1``, ``head_dist.1``."""
    names = {
        f"{layer.replace(classifiers[0], other, 1)}.{part}": f"{other}.{part}"
        for other in classifiers
        for part in ("weight", "bias")
    }
    return replace(file, tensors={names.get(name, name): tensor for name, tensor in file.tensors.items()})


def _note(layer: str, classifiers: list[str]) -> dict[str, str]:
    text = f"{layer}, the only linear layer in place of {classifiers[0]}"
    return {"classifier": f"{text}, taken without an activation before it, which no tensor would show"}


def _shapes(file: TensorFile, name: str, hints: LoadHints) -> Shapes:
    return Shapes(file.tensors, name, channels=hints.channels, record=file.record)


def _fitted(
    file: TensorFile, name: str, source: CheckpointSource, hints: LoadHints, check: Callable[[ModelSpec], None]
) -> FittedFile:
    shapes = _shapes(file, name, hints)
    with errors_that_name(name):
        spec: ModelSpec = source.spec(shapes, hints)
    check(spec)
    if isinstance(spec, HuggingFaceSpec):
        file = with_network_names(file, spec)
    with errors_that_name(name):
        origins = source.tensors(spec, tensors_of(spec))
    used = {key for origin in origins.values() for key in origin_keys(origin)}
    file = without_training(file, used)
    others = [key for key in file.tensors if key not in used]
    modules = {key[: dot.start()] for key in used for dot in re.finditer(r"\.", key)}
    unused = {
        key: why
        for key in others
        for pattern, why in source.known_unused(spec).items()
        if re.fullmatch(pattern, key) and (not pattern.startswith(".+") or key.rpartition(".")[0] in modules)
    }
    refuse_misfits(file, spec, origins, unused)
    return FittedFile(file=file, shapes=shapes, spec=spec, origins=origins, unused=unused)


@contextmanager
def errors_that_name(path: str) -> Iterator[None]:
    """Put the path of the file before the message of a `SpecError` that begins with neither the path nor an option."""
    try:
        yield
    except SpecError as exc:
        if str(exc).startswith((path, "--")):
            raise
        raise SpecError(f"{path}: {exc}", hint=exc.hint) from exc


def refuse_misfits(file: TensorFile, spec: ModelSpec, origins: TensorOrigins | None, unused: Mapping[str, str]) -> None:
    """Errors: CheckpointError when tensors, but those of ``unused``, do not fit (`misfits`)."""
    problems = misfits(spec, {key: tensor for key, tensor in file.tensors.items() if key not in unused}, origins)
    if problems:
        raise MissingTensorError(
            f"{file.path}: the file ({file.wrapping}) was read as {spec.title}, and "
            f"{len(problems)} keys do not fit this architecture:{listed(problems)}",
            names=tuple(key for key in (origins or {}).values() if isinstance(key, str) and key not in file.tensors),
            hint=spec.misfit_hint
            or "use a file whose keys all match the architecture: gmmvit neither fills in missing tensors nor "
            "ignores unknown tensors",
        )


def backbone_of(file: TensorFile) -> tuple[TensorFile, str] | None:
    """Return a network without classifier under a prefix, such as ``self.encoder`` of a user's class, and the only
    linear layer beside it, as ``head``; and where this classifier comes from.

    None if no part without classifier has more than half of the tensors, or if more is beside it than the linear layer,
    losses and metrics.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in file.tensors.items() if not of_training(name)}
    outer = _common(shapes)
    parts = Counter(name.removeprefix(outer).partition(".")[0] for name in shapes)
    largest = max(parts, key=lambda part: parts[part], default="")
    if 2 * parts[largest] <= len(shapes):
        return None
    prefix = _common(name for name in shapes if name.startswith(f"{outer}{largest}."))
    names = {name: name.removeprefix(prefix) for name in file.tensors}
    beside = {name: shape for name, shape in shapes.items() if not name.startswith(prefix)}
    if any(CLASSIFIER.fullmatch(names[name]) for name in names.keys() - beside.keys()):
        return None
    weights = [name for name, shape in beside.items() if name.endswith(".weight") and len(shape) == 2]
    layer = weights[0].removesuffix(".weight") if len(weights) == 1 else ""
    if beside.keys() != {f"{layer}.weight", f"{layer}.bias"}:
        return None
    names |= {f"{layer}.{part}": f"head.{part}" for part in ("weight", "bias")}
    tensors = {names[name]: tensor for name, tensor in file.tensors.items()}
    words = f"network under '{prefix}', its classifier {layer} beside it"
    origin = (
        f"{layer}, the only linear layer beside the network under '{prefix}', taken after the network's own pooling "
        "and without an activation before it, which no tensor would show"
    )
    return replace(file, tensors=tensors, wrapping=f"{file.wrapping}, {words}"), origin


def _common(names: Iterable[str]) -> str:
    """Return the longest prefix of whole parts, such as ``net.encoder.``, that all names have."""
    parts = [name.split(".")[:-1] for name in names]
    common = takewhile(lambda level: len({*level}) == 1, zip(*parts, strict=False))
    return "".join(f"{level[0]}." for level in common)
