"""Probe a service on this machine, as Kubernetes does in its pod: exit status 0, or 1 with the reason on stdout.

    python -m gmmvit_deploy.serving._pod_probe ready                    the service is ready for requests
    python -m gmmvit_deploy.serving._pod_probe infer --key-file FILE    each neural network answers an inference

Triton's ``/v2/health/live`` and ``/v2/health/ready`` stay 200 when the worker of a network has died, so ``infer`` sends
a real inference. A service that refuses the inference because of overload, or answers late, is alive: the gateway's own
inference, of the first network, does not wait in the queue and is the evidence then. So a network behind the first that
hangs is left to the supervisor of ``gmmvit serve``. A service that drains refuses the connection.

This module imports little, because Kubernetes starts it every few seconds.
"""

from __future__ import annotations

import argparse
import http.client
import sys
from collections.abc import Sequence
from pathlib import Path

from gmmvit_deploy.errors import OverloadError, ServerError
from gmmvit_deploy.serving._probes import Address, ask, probe_of_model


def ready(address: Address, timeout_s: float) -> str:
    """Return why the service is not ready for requests, or "" if it is ready."""
    connection = address.connect(timeout_s)
    try:
        connection.request("GET", "/v2/health/ready")
        status = connection.getresponse().status
    except TimeoutError:
        return f"no answer within {timeout_s:g} s: the service starts, or hangs"
    except (OSError, http.client.HTTPException) as exc:
        return f"no service on port {address.port}: {exc or type(exc).__name__}"
    finally:
        connection.close()
    return "" if status == 200 else f"not ready: status {status} of /v2/health/ready"


def infer(address: Address, model: str, timeout_s: float, *, bundle: str = "") -> tuple[bool, str]:
    """Return whether the model answers an inference, and the reason or what was seen.

    bundle: the SHA-256 of the bundle that must answer; "" accepts every bundle.
    """
    try:
        probe = probe_of_model(address, model, timeout_s=timeout_s)
    except OverloadError as exc:
        return _despite_overload(address, timeout_s, str(exc))
    except ServerError as exc:
        return False, str(exc)
    if probe is None:
        return False, f"{model}: no example of its input is known"
    answer = ask(address, probe, timeout_s)
    if answer.result == "answered":
        if bundle and probe.bundle != bundle:
            return False, f"{model}: expected the bundle {bundle[:16]}, but {probe.bundle[:16] or 'no bundle'} answers"
        return True, f"{model} answered after {answer.seconds * 1000:.0f} ms"
    why = f"{model}: {answer.result}: {answer.detail}"
    if answer.status == 503 or answer.result == "late":
        return _despite_overload(address, timeout_s, why)
    return False, why


def _despite_overload(address: Address, timeout_s: float, why: str) -> tuple[bool, str]:
    """Judge a refused or late probe by the readiness of a gateway, which is an inference.  Triton's own is not."""
    if address.key and not ready(address, timeout_s):
        return True, f"overloaded, and the gateway's own inference is answered ({why})"
    return False, why


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m gmmvit_deploy.serving._pod_probe", description=__doc__)
    parser.add_argument("what", choices=("ready", "infer"))
    parser.add_argument("--port", type=int, default=8000, help="port for HTTP on this machine")
    parser.add_argument("--tls", action="store_true", help="the port uses TLS")
    parser.add_argument("--key-file", type=Path, help="file with a key for the gateway, alone on a line")
    models = "NAME or NAME=SHA256 of each model to ask, with the SHA-256 of the bundle that must answer"
    parser.add_argument("--models", nargs="+", default=["gmmvit"], help=models)
    parser.add_argument("--timeout", type=float, default=2.0, help="time in seconds for each request")
    chosen = parser.parse_args(arguments)
    try:
        key = chosen.key_file.read_text(encoding="utf-8-sig").strip() if chosen.key_file else ""
    except (OSError, UnicodeDecodeError) as exc:
        print(f"{chosen.key_file}: the key cannot be read: {exc}")
        return 1
    address = Address(host="127.0.0.1", port=chosen.port, tls=chosen.tls, key=key)
    if chosen.what == "ready":
        why = ready(address, chosen.timeout)
        print(why or "ready")
        return 1 if why else 0
    for stated in chosen.models:
        model, _, bundle = stated.partition("=")
        alive, text = infer(address, model, chosen.timeout, bundle=bundle)
        print(text)
        if not alive:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
