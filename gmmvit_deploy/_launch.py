"""Replace this process by a program that ends when its parent ends.

Run this file as a script with the arguments PARENT_PID PROGRAM ARG... . Linux sends SIGTERM to the program when
the parent ends for any reason, including SIGKILL. A server therefore ends when the process that started it ends.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent ended before Linux received the request above
        sys.exit(1)
    os.execv(program, [program, *arguments])  # noqa: S606 - deliberately without a shell
