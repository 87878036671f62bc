"""State whether the sums of int8 products can saturate on this CPU.

Without VNNI, x86-64 multiplies two pairs of int8 values and adds the products in 16 bits (``vpmaddubsw``). A sum beyond
±32767 saturates, and the logits are wrong although the graph is right.

``gmmvit repository`` copies this file into the folder of a served model, so this file imports no module of this
project.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["has_vnni", "int8_saturates"]

_CPUINFO = Path("/proc/cpuinfo")


def has_vnni(cpuinfo: Path = _CPUINFO) -> bool | None:
    """Return whether this CPU multiplies int8 values into 32 bits; None if the kernel's list of CPUs does not say.

    cpuinfo: the kernel's list of CPUs, which has no line of flags on ARM; tests give other files.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), None)
    return None if flags is None else not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


def int8_saturates(cpuinfo: Path = _CPUINFO) -> str:
    """Return why products in int8 may saturate on this CPU, or an empty string if they cannot.

    cpuinfo: as in `has_vnni`.
    """
    if has_vnni(cpuinfo) is not False:
        return ""
    return "this CPU has no VNNI, so pairs of int8 products are added in 16 bits, which can saturate"
