"""Read an engine's layers from the text that TensorRT prints.

The builder's verbose log and the engine inspector print the same lines:

    Name: _gemm_mha_v2_myl0_10, LayerType: kgen, Inputs: [ { Name: …, Datatype: Half, … } ],
    Constants: [ … ], Outputs: [ … ], TacticName: …, StreamId: 0,
    Metadata: [ONNX Layer: blocks.0.attention/MatMul][ONNX Layer: blocks.0.attention/Softmax]…

The number in ``_myl0_`` is the index of the optimisation profile (a range of batch sizes). The metadata lists the ONNX
nodes that the layer computes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gmmvit_deploy.errors import EngineError

__all__ = ["Layer", "layers_from_text", "shares_of"]

_LINE = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: (?P<inputs>.*?), "
    r"(?:Constants: .*?, )?Outputs: (?P<outputs>.*?), (?P<rest>(?:Parameter|Tactic|StreamId|Metadata).*)$"
)
_TYPE = re.compile(r"Datatype: ([^,}\]]+)")
_ONNX = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_PROFILE = re.compile(r"_myl(\d+)_\d+$|\[profile (\d+)\]")
_PRODUCTS = frozenset({"gemm", "gemv", "correlation", "convolution", "runtime_fusion"})
# Pattern in TensorRT's name of a data type → this project's name; the first pattern that matches is used. For fp16,
# TensorRT 11 and TensorRT for RTX print "Half"; TensorRT 10 prints "Half" or "Row major linear FP16 format".
_NAMES = (
    (re.compile(r"bfloat16|bf16", re.IGNORECASE), "bf16"),
    (re.compile(r"half|fp16", re.IGNORECASE), "fp16"),
    (re.compile(r"uint8", re.IGNORECASE), "uint8"),
    (re.compile(r"int8", re.IGNORECASE), "int8"),
    (re.compile(r"fp8", re.IGNORECASE), "fp8"),
    (re.compile(r"float|fp32", re.IGNORECASE), "fp32"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of an engine: a GPU kernel, or a step on the host.

    kind: TensorRT's name for the kind of layer.  profile: the index of the optimisation profile, from 0.
    reads, writes: the data types of the inputs without constants, and of the outputs, such as ``fp16``; empty for shape
    arithmetic.
    nodes: the names of the ONNX nodes that the layer computes.
    """

    name: str
    kind: str
    profile: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def precision(self) -> str | None:
        """The narrowest data type of the inputs, or of the outputs without inputs; None for shape arithmetic."""
        types = self.reads or self.writes
        return min(types, key=_bits) if types else None

    @property
    def multiplies(self) -> bool:
        """True if the layer computes a matrix product or a convolution, alone or fused with other nodes."""
        return self.kind in _PRODUCTS or "mha" in self.name


def _bits(kind: str) -> int:
    return int(re.sub(r"\D", "", kind))


def layers_from_text(text: str) -> tuple[Layer, ...]:
    """Read all layers, in the order of the text.

    Errors: EngineError when the text lists no layer. This happens if the builder's verbosity was not detailed, or if
    the format of the text changed.
    """
    layers = tuple(_layer(match) for line in text.splitlines() if (match := _LINE.match(line)))
    if not layers:
        raise EngineError("TensorRT listed no layers, so attentions and precision cannot be checked")
    return layers


def _layer(match: re.Match[str]) -> Layer:
    name = match["name"]
    profile = _PROFILE.search(name)
    return Layer(
        name=name,
        kind=match["kind"].strip(),
        profile=int(profile[1] or profile[2]) if profile else 0,
        reads=_types(match["inputs"]),
        writes=_types(match["outputs"]),
        nodes=tuple(dict.fromkeys(_ONNX.findall(match["rest"]))),
    )


def _types(text: str) -> tuple[str, ...]:
    """Return this project's names of the data types in the text; types without a name, such as int64, are omitted."""
    named = (next((name for pattern, name in _NAMES if pattern.search(kind)), "") for kind in _TYPE.findall(text))
    return tuple(name for name in named if name)


def shares_of(layers: Iterable[Layer]) -> dict[str, float]:
    """Map each data type to the fraction of the layers with this precision; shape arithmetic is not counted."""
    counts = Counter(kind for layer in layers if (kind := layer.precision))
    return {kind: count / counts.total() for kind, count in counts.most_common()}
