"""Configure a running gateway for other models without a lost request.

The list of models, the check of a server and the size of the buffers are written in HAProxy's configuration. A rollout
may change all three: larger images need larger buffers, because only a request that fits into a buffer may wait.

    new HAProxy, new configuration  ──┐
                                      ├── the same listening sockets
    old HAProxy, old configuration  ──┘   the old process takes no new connection; it closes a connection with its next
                                          answer, and ends with its last connection or after 30 s
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from gmmvit_deploy.errors import GmmvitError, ServerError
from gmmvit_deploy.serving.gateway.options import GatewayOptions, HealthCheck
from gmmvit_deploy.serving.served_models import ServedModels

__all__ = ["Changes", "buffer_bytes", "options_for"]

_KIB = 1024
_PATIENCE_S = 10.0


def buffer_bytes(models: ServedModels) -> int:
    """Return the size of HAProxy's buffers: a request with a single image should fit, up to 1 MiB."""
    single_bytes = min(max(models.row_bytes, len(models.health.body)) + 48 * _KIB, 1024 * _KIB)
    return max(128 * _KIB, -(-single_bytes // (16 * _KIB)) * 16 * _KIB)


def options_for(options: GatewayOptions, served: Sequence[ServedModels]) -> GatewayOptions:
    """Return the options for servers with these models, at least one, of which clients may use all."""
    checks = {models.health for models in served}
    differ = "servers with different inputs run side by side; their supervisors probe both"
    either = HealthCheck(path="/v2/health/ready", infers=False, why_not=differ)
    return replace(
        options,
        models=tuple(sorted({name for models in served for name in models.names})),
        health=checks.pop() if len(checks) == 1 else either,
        buffer_bytes=max(buffer_bytes(models) for models in served),
    )


class Changes:
    """Passes a change from the thread of the rollouts to the thread of the gateway.

    Linux ends HAProxy with the thread that started it, so a single thread starts every HAProxy.
    """

    def __init__(self) -> None:
        self._asked: tuple[Sequence[ServedModels], threading.Event] | None = None
        self._error: GmmvitError | None = None

    def ask(self, served: Sequence[ServedModels]) -> None:
        """Wait until the gateway is configured for these models.

        Errors: ServerError when HAProxy refuses the configuration, or when the gateway does not answer in time.
        """
        done = threading.Event()
        self._error = None
        self._asked = served, done
        if not done.wait(_PATIENCE_S):
            self._asked = None
            raise ServerError(f"the gateway was not configured for the new bundle within {_PATIENCE_S:g} s")
        if self._error is not None:
            raise self._error

    def carry_out(self, change: Callable[[Sequence[ServedModels]], None]) -> None:
        """Carry out a change that was asked for; an error reaches the thread that asked."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        served, done = asked
        try:
            change(served)
        except GmmvitError as exc:
            self._error = exc
        finally:
            done.set()
