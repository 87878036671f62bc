"""Replace this process by a program that ends when its parent ends.

Run this file as a script with the arguments [--stack-bytes=N] PARENT_PID PROGRAM ARG... . Linux sends SIGTERM to the
program when the parent ends for any reason, including SIGKILL. A server therefore ends when the process that started
it ends. With ``--stack-bytes``, the main stack of the program and the default stack of each of its threads have this
size; a line on stderr reports a smaller limit of this system.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def limit_stack(stack_bytes: int) -> None:
    """Set the soft limit of the stack, up to the hard limit. glibc gives 2 MiB to threads if there is no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    limit = stack_bytes if hard == resource.RLIM_INFINITY else min(stack_bytes, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (limit, hard))
    if limit < stack_bytes:
        print(
            f"gmmvit: the hard limit of the stack is {limit} bytes, expected {stack_bytes}: a deeply nested request "
            "can end this server; raise the limit with ulimit -Hs unlimited, or with the settings of the container",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0].startswith("--stack-bytes="):
        limit_stack(int(arguments.pop(0).partition("=")[2]))
    parent, program, *arguments = arguments
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent ended before Linux received the request above
        sys.exit(1)
    os.execv(program, [program, *arguments])  # noqa: S606 - deliberately without a shell
