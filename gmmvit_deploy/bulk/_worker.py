"""A worker process on this machine: classifies the shards whose numbers its parent sends.

``python -m gmmvit_deploy.bulk._worker DESCRIPTOR``, with the descriptor of a socket to the parent.

    parent → worker   the `Job`; then the record of a shard, again and again; None ends the worker
    worker → parent   ("ready",)              the worker waits for a shard
                      ("images", count)       images of the present shard are done
                      ("done", number)        the shard's file is complete
                      ("held", number)        another process has claimed the shard
                      ("failed", text, hint)  the worker cannot go on, and ends

If the parent ends for any reason, the worker's next message fails, so the worker ends within a batch.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Any) -> None:
    """Work for the process at the other end of the connection until it sends None or ends."""
    from gmmvit_deploy.bulk.job import OpenJob

    with OpenJob(connection.recv()) as job:
        connection.send(("ready",))
        while (shard := connection.recv()) is not None:
            outcome = job.classify(shard, lambda count: connection.send(("images", count)))
            connection.send((outcome, shard.number))


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its workers
    connection = Connection(int(sys.argv[1]))
    from gmmvit_deploy.errors import GmmvitError

    try:
        serve(connection)
    except (BrokenPipeError, ConnectionResetError, EOFError):  # the parent has ended
        os._exit(1)
    except GmmvitError as exc:
        connection.send(("failed", str(exc), exc.hint))
    # Whatever else happens must reach the user through the parent.
    except Exception as exc:
        if os.environ.get("GMMVIT_DEBUG"):
            traceback.print_exc()
        connection.send(("failed", f"a worker failed: {type(exc).__name__}: {exc}", ""))


if __name__ == "__main__":
    _main()
