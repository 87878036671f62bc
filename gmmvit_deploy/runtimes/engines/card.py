"""Read and check the folder of an engine.

model.plan       the plan, the file that TensorRT loads
card.json        the card (`EngineCard`): a report on the engine's origin, options and checks
layers.txt       the layers of the engine, as the builder printed them; the card summarises these layers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import EngineError, InputError
from gmmvit_deploy.files.writing import sha256_of_file
from gmmvit_deploy.inference.precision import Precision
from gmmvit_deploy.runtimes.engines.flavors import FlavorName
from gmmvit_deploy.runtimes.engines.layers import AttentionProof, Miss
from gmmvit_deploy.runtimes.engines.options import Profile, profile_from

CARD_FORMAT = "gmmvit-engine/1"
PLAN_FILE, CARD_FILE, LAYERS_FILE = "model.plan", "card.json", "layers.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskCost:
    """Sizes and times of an engine and of its twin, of the same graph with a scalar in place of every mask.

    layers: their number, with shape arithmetic.  bytes: of the plan.
    milliseconds: batch size → median time on the GPU; None if no GPU was visible.
    """

    layers: int
    twin_layers: int
    kernels: int
    twin_kernels: int
    bytes: int
    twin_bytes: int
    milliseconds: Mapping[str, float] | None = None
    twin_milliseconds: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCard:
    """Content of ``card.json``: an engine's origin, options and checks.

    A target is a compute capability that the build named, or the name of the GPU that built the engine.
    sha256: the hashes of ``plan`` and ``onnx``, and of ``bundle`` and ``checkpoint`` if it was built from a bundle.
    masks: attention layer of the model → SHA-256 of the bytes of the layer's mask in the ONNX graph.
    target: ``capabilities`` and ``driver``, and ``gpu``, None if the build named capabilities.
    tensor: name, dtype and shape of the input, without the batch.
    flags: the options of the build that have no field (`BuildOptions.flags`).
    attentions: the layers that compute each attention, in each profile on each target.
    misses: the matrix products and convolutions that run in another data type than the precision promises.
    unjudged: why these data types could not be checked, such as operators without a role; empty if they were.
    shares: target → data type → the fraction of the layers that run in this data type.
    layers: target → the number of layers in each profile.
    unfolded: what the graph computes at run time although it is constant, such as masks.
    """

    sha256: Mapping[str, str]
    masks: Mapping[str, str]
    precision: Precision
    flavor: FlavorName
    tensorrt_version: str
    target: Mapping[str, Any]
    tensor: Mapping[str, Any]
    profiles: tuple[Profile, ...]
    flags: Mapping[str, Any]
    trtexec: str
    size_bytes: int
    build_seconds: float
    attentions: tuple[AttentionProof, ...]
    misses: tuple[Miss, ...]
    unjudged: str
    shares: Mapping[str, Mapping[str, float]]
    layers: Mapping[str, list[int]]
    unfolded: tuple[str, ...]
    mask_cost: MaskCost | None
    versions: Mapping[str, str]

    @property
    def max_batch(self) -> int:
        return max(profile.maximum for profile in self.profiles)

    def profile_for(self, batch: int) -> int:
        """Return the index of the first profile that contains ``batch``.  Errors: InputError when none does."""
        for index, profile in enumerate(self.profiles):
            if profile.minimum <= batch <= profile.maximum:
                return index
        ranges = ", ".join(f"{profile.minimum}..{profile.maximum}" for profile in self.profiles)
        raise InputError(
            f"expected a batch of {ranges} images, as in the engine's profiles, got {batch}",
            hint=f"type gmmvit build with --batch 1:{min(8, batch)}:{max(batch, self.max_batch)}, or split the batch",
        )

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__slots__}
        data["profiles"] = [str(profile) for profile in self.profiles]
        for name in ("attentions", "misses"):
            data[name] = [asdict(entry) for entry in data[name]]
        data["mask_cost"] = asdict(self.mask_cost) if self.mask_cost else None
        return {"format": CARD_FORMAT, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineCard:
        """Errors: KeyError, TypeError, ValueError or InputError when the data is not a card of this format."""
        if data["format"] != CARD_FORMAT:
            raise ValueError(f"expected format {CARD_FORMAT!r}, got {data['format']!r}")
        fields = {name: value for name, value in data.items() if name != "format"}
        fields["profiles"] = tuple(profile_from(text) for text in fields["profiles"])
        fields["attentions"] = tuple(
            AttentionProof(**{**proof, "kernels": tuple(proof["kernels"])}) for proof in fields["attentions"]
        )
        fields["misses"] = tuple(Miss(**miss) for miss in fields["misses"])
        fields["unfolded"] = tuple(fields["unfolded"])
        fields["mask_cost"] = MaskCost(**fields["mask_cost"]) if fields["mask_cost"] else None
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An opened engine, whose plan matches the card."""

    path: Path  # the folder
    card: EngineCard

    @property
    def plan_path(self) -> Path:
        return self.path / PLAN_FILE


def open_engine(path: Path) -> Engine:
    """Open an engine, and check that the plan matches the card.

    path: the engine's folder, or the file of the plan in this folder.
    Errors: EngineError when the folder has no readable card, or when the plan is missing or does not match the card.
    """
    folder = path.parent if path.name == PLAN_FILE else path
    card_path, plan_path = folder / CARD_FILE, folder / PLAN_FILE
    rebuild = "type gmmvit build BUNDLE to build the engine again"
    if not card_path.is_file():
        missing = "does not exist" if not path.exists() else "has no build report"
        problem = "holds no card.json" if folder.is_dir() else missing
        raise EngineError(f"{path}: expected the folder of an engine, but it {problem}", hint=rebuild)
    try:
        card = EngineCard.from_json(json.loads(card_path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InputError) as exc:
        raise EngineError(
            f"{card_path}: expected the build report of an engine, but the file cannot be read: {exc}", hint=rebuild
        ) from exc
    if not plan_path.is_file():
        raise EngineError(f"{plan_path} is missing", hint=rebuild)
    size = plan_path.stat().st_size
    if size != card.size_bytes:
        raise EngineError(
            f"{plan_path}: expected {card.size_bytes} bytes, got {size}: the plan is truncated, "
            "or does not belong to its build report",
            hint="copy the engine's folder again, or build the engine again",
        )
    if sha256_of_file(plan_path) != card.sha256["plan"]:
        raise EngineError(
            f"{plan_path}: the SHA-256 of the plan differs from its build report: the plan was changed or damaged",
            hint=rebuild,
        )
    return Engine(path=folder, card=card)


def require_bundle(bundle: Bundle, engine: Engine) -> None:
    """Check that the engine was built from this bundle.  Errors: EngineError when it was not."""
    made_from = engine.card.sha256.get("bundle")
    if made_from != bundle.sha256:
        origin = f"bundle {made_from[:12]}…" if made_from else "an ONNX file that belongs to no bundle"
        raise EngineError(
            f"{engine.path}: expected an engine built from {bundle.path} ({bundle.sha256[:12]}…), "
            f"got an engine built from {origin}",
            hint=f"type gmmvit build {bundle.path}",
        )
