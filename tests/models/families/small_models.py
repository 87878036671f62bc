"""The small models of the contract: a model for each family and kind of mask, exported once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
import torch

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.checkpoints.weights import bytes_from_model
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.onnx_from_model import onnx_from_model
from gmmvit_deploy.graphs import roles
from gmmvit_deploy.inference.precision import QUANTIZED, Precision
from gmmvit_deploy.models.families import FAMILIES, Family, model_from_spec
from gmmvit_deploy.models.layers.model import Model
from gmmvit_deploy.models.specs import MaskKind, ModelSpec, input_shape
from gmmvit_deploy.runtimes.programs.emulated_precision import emulated_logits
from gmmvit_deploy.tolerances import Noise, limit_from_noise
from tests.conftest import once
from tests.exact import exact_logits
from tests.models.families.small_specs import small_spec, variants

MAX_BATCH = 4


@dataclass(frozen=True)
class Small:
    """A small model of a family with a kind of mask, or a variant of the family without a mask."""

    family: Family
    kind: MaskKind
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.family.name}-{self.variant or self.kind}"

    @property
    def spec(self) -> ModelSpec:
        return variants(self.family)[self.variant] if self.variant else small_spec(self.family.name, self.kind)

    def model(self) -> Model:
        return distinct_model(self.spec)

    def images(self, count: int = MAX_BATCH) -> np.ndarray:
        return random_images(self.spec, count)


def distinct_model(spec: ModelSpec) -> Model:
    """Return the model with distinct weights and buffers, all different from 0 and 1."""
    torch.manual_seed(0)
    model = model_from_spec(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name == "position_embedding":
                buffer.normal_()
    return model


def random_images(spec: ModelSpec, count: int = MAX_BATCH) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((count, *input_shape(spec)), dtype=np.float32)


_ORDER = ("plain", "decay", "elm", "gmm")
_VARIANTS = tuple(Small(family, "plain", variant) for family in FAMILIES for variant in variants(family))
SMALL = (*(Small(family, kind) for family in FAMILIES for kind in family.mask_kinds), *_VARIANTS)
FAMILY_EXAMPLES = (*(Small(family, max(family.mask_kinds, key=_ORDER.index)) for family in FAMILIES), *_VARIANTS)
"""A small model of each family, with GMM masks if it has them, and all variants. Only these are exported:
tests/export/test_bundle.py exports the golden files, which have every kind of mask."""


def _refuse(graph: ir.Graph) -> None:
    raise AssertionError("a role was guessed")


def require_logits_of_precision(graph: ir.Model, precision: Precision, model: Model, images: np.ndarray) -> float:
    """Check that a graph in another precision computes the float64 logits of the model, within limits.

    Returns the largest difference, divided by the largest logit.
    """
    trained = exact_logits(model, images)
    errors = emulated_logits(graph, images, name=precision) - trained
    noises = model(torch.from_numpy(images)).detach().numpy() - trained
    largest, noise = (float(np.abs(values).max()) for values in (errors, noises))
    rms, rms_noise = (float(np.sqrt(np.mean(values**2))) for values in (errors, noises))
    scale = float(np.abs(trained).max())
    if precision in QUANTIZED:  # more than rounding, but far less than the distance of another network
        assert largest < scale / 2
    else:
        limit = limit_from_noise(Noise(largest=noise, rms=rms_noise, scale=scale), precision)
        assert limit.rms is not None
        assert largest <= limit.largest
        assert rms <= limit.rms
    return largest / scale


@contextmanager
def failing_rules() -> Iterator[None]:
    """Inside, the rules that guess roles from operators and wiring raise: a family's own roles must suffice."""
    with patch.multiple(roles, guessed_roles=_refuse, guessed_attentions=_refuse):
        yield


@dataclass
class SmallExports:
    """Bundles of small models, and the float32 graphs of each precision, exported with `failing_rules`."""

    folder: Path
    graphs: dict[tuple[str, bool], ir.Model] = field(default_factory=dict)

    def bundle(self, small: Small) -> Bundle:
        def make(out: Path) -> None:
            weights = self.folder / f"{small}.safetensors"
            weights.write_bytes(bytes_from_model(small.model()))
            with failing_rules():
                bundle_from_checkpoint(weights, out, ExportOptions(input_kind="tensor", max_batch=MAX_BATCH))

        return once(self.folder / f"small-{small}", make)

    def graph(self, small: Small, precision: Precision, model: Model) -> ir.Model:
        """What `onnx_from_model` gives for the folded form of this precision; torch exports each form once."""
        key = (str(small), precision in QUANTIZED)
        if key not in self.graphs:
            with failing_rules():
                self.graphs[key] = onnx_from_model(model, preprocessing=None, max_batch=MAX_BATCH)
        return self.graphs[key].clone()
