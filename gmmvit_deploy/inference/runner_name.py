"""The name of a runner: what computes the network, and in which precision.

    RUNTIME[+kernels][:PRECISION[-FORM][+fp32]]     openvino, onnxruntime-cuda:fp16, openvino+kernels:int8-mixed+fp32

``+fp32`` names a cascade (`cascade`): the same runtime computes nearly undecided images again in float32. The same text
follows ``--runner``, and stands in ``runners.json``, in the configuration of a Triton model, in a served answer and in
reports. Float32 is not written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .precision import Form, Precision

KERNELS_SUFFIX = "+kernels"
CASCADE_SUFFIX = "+fp32"


def with_form(precision: Precision, form: Form) -> str:
    """Return a precision with the form of its int8 graph, such as ``int8-static``."""
    return f"{precision}-{form}" if form else precision


@dataclass(frozen=True, slots=True)
class RunnerName:
    """The name of a runner.

    runtime: the name without ``+kernels``, such as ``openvino``, ``onnxruntime-cuda`` or ``eager``.
    precision: of the computation.
    kernels: True if this project's CPU kernels compute the attentions.
    form: of an int8 graph: activations have static ranges, are quantised while the network runs (dynamic), or both
    (mixed), or have static ranges in a network that merges tokens (merged); "" for the first form that the bundle has,
    and for another precision.
    cascade: True if nearly undecided images are computed again in float32.
    """

    runtime: str
    precision: Precision = "fp32"
    kernels: bool = False
    form: Form = ""
    cascade: bool = False

    @classmethod
    def parse(cls, text: str, precision: Precision = "fp32") -> RunnerName:
        """Read a name.  Whether such a runner exists is not checked: `runtimes.runners.names.runner_from` does.

        precision: of a name without a precision.
        """
        name, colon, stated = text.strip().partition(":")
        kernels = name.endswith(KERNELS_SUFFIX)
        cascade = stated.endswith(CASCADE_SUFFIX)
        stated, _, form = stated.removesuffix(CASCADE_SUFFIX).partition("-")
        parts: list[Any] = [stated if colon else precision, kernels, form, cascade]
        return cls(name.removesuffix(KERNELS_SUFFIX), *parts)

    def __str__(self) -> str:
        if self.precision == "fp32":
            return self.name
        return f"{self.name}:{self.arithmetic}"

    @property
    def arithmetic(self) -> str:
        """What follows the colon of the text, such as ``int8-mixed+fp32``."""
        return f"{with_form(self.precision, self.form)}{CASCADE_SUFFIX if self.cascade else ''}"

    @property
    def stages(self) -> tuple[RunnerName, RunnerName]:
        """The runners of a cascade: the fast one, and that of float32."""
        return replace(self, cascade=False), RunnerName(self.runtime, kernels=self.kernels)

    @property
    def name(self) -> str:
        """The name without the precision, such as ``openvino+kernels``."""
        return f"{self.runtime}{KERNELS_SUFFIX if self.kernels else ''}"
