"""Run several checkouts of the project, each in a separate worker process that computes only on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("checkout_worker.py")


class Checkout:
    """A checkout with a running worker process.  `opened_checkout` starts and ends the process."""

    def __init__(self, process: subprocess.Popen[str], name: str, root: Path) -> None:
        self.root = root
        self._process = process
        self._name = name

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Call a method of `checkout_worker.Worker`; return its answer.  Errors: SystemExit with the worker's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # the code below reports how the worker ended
            print(json.dumps({"ask": what, **fields}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise SystemExit(f"{self._name}: the worker process ended with status {status} during the request {what}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SystemExit(f"{self._name}: cannot {what}: {answer['error']}")
        return answer


@contextmanager
def opened_checkout(path: Path, name: str) -> Iterator[Checkout]:
    """Start a worker that imports ``gmmvit_deploy`` from the checkout at ``path``, and end it.  Errors: SystemExit."""
    root = path.resolve()
    if not (root / "gmmvit_deploy" / "__init__.py").is_file():
        raise SystemExit(f"{name}: expected a checkout with the folder gmmvit_deploy/, got {path}")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "cli")])}
    with subprocess.Popen([sys.executable, str(_WORKER)], env=environment, cwd=root, **pipes) as process:
        checkout = Checkout(process, name, root)
        try:
            imported = Path(checkout.ask("where")["path"]).resolve()
            if root not in imported.parents:
                raise SystemExit(f"{name}: expected the package gmmvit_deploy in {root}, got {imported}")
            yield checkout
        finally:
            process.kill()


def commit_of(path: Path) -> str:
    """Return the commit of a checkout, with ``+`` if its files differ from the commit; "unknown" without git."""
    try:
        command = ["git", "-C", str(path), "describe", "--always", "--abbrev=12", "--dirty=+"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
