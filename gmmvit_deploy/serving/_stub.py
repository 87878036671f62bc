"""Make the Python stub of the nvidia-pytriton wheel work with numpy 2.

The stub, the program that runs Python models, was compiled for numpy 1. It reads the size of an array's elements in
numpy's C structure PyArray_Descr (``elsize``), at byte 32 in numpy 1 and at byte 40 in numpy 2, where byte 32 has
flags. Under numpy 2, an unchanged stub therefore sends outputs without bytes, and reads the first byte of a string in
place of each of its bytes, without an error. Source: numpy's ndarraytypes.h; numpy's guide for the change from 1 to 2.

Five instructions read the size, the same in the stub of each Python version. `stub_for_numpy_2` writes the new
position into them. Only the copy that a server starts is changed. Everything else that the stub uses of numpy is the
same in both.
"""

from __future__ import annotations

from gmmvit_deploy.errors import ServerError

_OLD, _NEW = b"\x20", b"\x28"  # bytes 32 and 40
_READS = (
    # movslq 32(%rax), %rax; imul %rdx, %rax; mov %rax, 104(%rbx): the size of an output
    (4, bytes.fromhex("48 63 40"), bytes.fromhex("48 0f af c2 48 89 43 68")),
    # mov %rax, %r14; mov (%rsi), %rax; mov 32(%rax), %eax; mov %eax, …: the strides of an input
    (1, bytes.fromhex("49 89 c6 48 8b 06 8b 40"), bytes.fromhex("89")),
)
"""(how often it occurs, code up to the position, code after the position)"""


def stub_for_numpy_2(stub: bytes) -> bytes:
    """Return the program of the stub for numpy 2.

    Errors: ServerError when the program is not a stub of the wheel that this package was written for.
    """
    for count, before, after in _READS:
        if stub.count(before + _OLD + after) != count:
            raise ServerError(
                "the Python stub of the installed nvidia-pytriton is not one that this package can use with numpy 2",
                hint="pip uninstall nvidia-pytriton: gmmvit then fetches the version that it was written for",
            )
        stub = stub.replace(before + _OLD + after, before + _NEW + after)
    return stub
