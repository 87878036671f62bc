"""``gmmvit serve --gateway --state`` as a process of its own, and the orders that ``gmmvit rollout`` sends to it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from gmmvit_deploy.serving.rollout.control import send_order
from tests.serving.commands import ready

ORDER: dict[str, Any] = {
    "order": "rollout",
    "images": [],
    "agreement": 0.95,
    "allow_contract_change": False,
}
"""An order for a rollout, without its bundle."""
_STOP_S = 60.0


class StateService:
    """A running service; it ends with ``with StateService(…) as service:``.

    state: the state folder, ``service`` in the folder of the service; ``service.log`` and ``access.log`` lie beside it.
    where: what the command prints, such as the addresses ``http`` and ``grpc``.
    """

    def __init__(self, folder: Path, keys: Path, *arguments: str) -> None:
        """Start the service, and wait until it is ready.

        keys: the key file.  arguments: more arguments of the command, such as the bundle; none after a restart.
        Errors: SystemExit when the service does not start, with its log.
        """
        self.folder, self.state = folder, folder / "service"
        command = [sys.executable, "-m", "gmmvit_cli.main", "serve", *arguments]
        command += ["--gateway", "--state", str(self.state), "--keys", str(keys), "--json"]
        command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        command += ["--access-log", str(folder / "access.log")]
        self._errors = (folder / "service.log").open("a")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        try:
            self.where = ready(self.process)
        except SystemExit as error:
            error.add_note((folder / "service.log").read_text())
            raise

    def __enter__(self) -> StateService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        self.kill()

    def order(self, **changes: Any) -> dict[str, Any]:
        """Send an order for a rollout, `ORDER` with ``changes``, and return the last event."""
        *_, last = send_order(self.state, {**ORDER, **changes})
        return last

    def stop(self) -> int:
        """End the service with SIGTERM, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(_STOP_S)
        self._errors.close()
        return status

    def kill(self) -> None:
        """Kill the service if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._errors.close()
