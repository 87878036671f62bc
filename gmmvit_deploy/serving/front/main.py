"""The process of the front: reads its options from stdin, and serves until SIGTERM.

stdin is a line of JSON: the secret, the file descriptor of the listening socket, and the options. The secret is not on
the command line, which every user of the machine can read.
"""

from __future__ import annotations

import json
import logging
import socket
import sys

import uvicorn

from gmmvit_deploy.serving.front.app import front_app
from gmmvit_deploy.serving.front.options import options_from_json

__all__ = ["main"]

_EXIT_TIMEOUT_S = 15
_HEADER_BYTES = 32 * 2**10


def main() -> None:
    """Serve until SIGTERM; then answer the requests that were received, for at most 15 s."""
    settings = json.loads(sys.stdin.readline())
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="front: %(message)s")
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs every malformed body
    config = uvicorn.Config(
        front_app(options_from_json(settings["options"]), settings["secret"]),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_keep_alive=75,  # longer than the gateway keeps idle connections
        timeout_graceful_shutdown=_EXIT_TIMEOUT_S,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=settings["socket"])])


if __name__ == "__main__":
    main()
