"""State whether sums of int8 products can saturate on this CPU.

On x86-64 CPUs without VNNI, runtimes usually multiply int8 values with ``vpmaddubsw``, which adds two products in 16
bits. A sum beyond ±32767 saturates, and the logits are wrong although the graph is right. ONNX Runtime has a setting
against it (`onnxruntime_program`), OpenVINO has none.
"""

from __future__ import annotations

from pathlib import Path

from .cores import cpu_flags

_CPUINFO = Path("/proc/cpuinfo")


def has_vnni(cpuinfo: Path = _CPUINFO) -> bool | None:
    """Return whether this CPU multiplies int8 values into 32 bits; None if ``/proc/cpuinfo`` does not say."""
    flags = cpu_flags(cpuinfo)
    return None if flags is None else not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


def int8_saturates(cpuinfo: Path = _CPUINFO) -> str:
    """Return why sums of int8 products may saturate on this CPU; empty if they cannot, or if this is not known."""
    if has_vnni(cpuinfo) is not False:
        return ""
    return "this CPU has no VNNI, so pairs of int8 products are added in 16 bits, which can saturate"
