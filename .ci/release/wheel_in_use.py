"""Install the wheel into an empty environment and use it there: export, optimize, serve, classify."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from release.steps import ReleaseError, clean_environment, run

__all__ = ["find_python", "largest_difference", "probabilities", "serving", "use_wheel"]

TOLERANCE = 1e-5
"""Largest difference of a class's probability between the server and the bundle in process.

Both run the same float32 graph on the same pixels; batches of other sizes and kernels differ by rounding. Largest seen:
1.4e-7, with and without the CPU kernels. Swapping red and blue changes a probability by 9e-2,
one grey level more by 2e-2.
"""
_STOP_TIMEOUT_S = 60.0

Probabilities = Mapping[str, Mapping[str, float]]
"""Name of an image → label → probability."""

_WRITE_IMAGES = """
import random, sys
from pathlib import Path
from PIL import Image

numbers = random.Random(0)
for index in range(8):
    coarse = Image.frombytes("RGB", (8, 8), numbers.randbytes(8 * 8 * 3))
    coarse.resize((32, 32)).save(Path(sys.argv[1]) / f"{index}.png")
"""

_TOO_NEW = """
import sys
from gmmvit_deploy.serving.server_wheel import NEWEST_PYTHON
print(sys.version_info[:2] > NEWEST_PYTHON)
"""


def find_python(version: str) -> Path | str:
    """Return the interpreter of a version such as "3.11", or the reason why this machine does not have the version.

    The running interpreter, else pythonX.Y on PATH, else pyenv's.
    """
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    name = f"python{version}"
    on_path = shutil.which(name)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    programs = [*([on_path] if on_path else []), *map(str, pyenv.glob(f"versions/{version}.*/bin/{name}"))]
    # The name alone proves nothing: pyenv's on PATH runs only versions switched on, and Debian's may lack venv.
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    reasons = []
    for program in programs:
        command = [program, "-c", code]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())
        if answer.stdout.strip() == version:
            return Path(program)
        output = (answer.stderr.strip() or answer.stdout.strip() or "no output").splitlines()
        # A traceback names its error at the end, a program at the beginning.
        reasons.append(f"{program} cannot be used: {output[-1] if output[0].startswith('Traceback') else output[0]}")
    return "; ".join(reasons) or f"there is no {name} on PATH or in pyenv"


def use_wheel(python: Path, wheel: Path, checkpoint: Path, folder: Path) -> str:
    """Install the wheel in ``folder`` with the extras ``cpu`` and ``serve``; export, optimize and serve a checkpoint.

    Python versions newer than the server of nvidia-pytriton are used up to the classification in process.

    checkpoint: a classifier of 32×32 colour images with CIFAR-10's ten classes.
    Returns the result in a sentence.  Errors: ReleaseError.
    """
    folder.mkdir(parents=True)
    environment = folder / "environment"
    run([str(python), "-m", "venv", str(environment)], "create an environment", cwd=folder)
    installed, gmmvit = str(environment / "bin" / "python"), str(environment / "bin" / "gmmvit")
    pip = [installed, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, f"{wheel.resolve()}[cpu,serve]"], "install the wheel", cwd=folder)
    _require_import_from(environment, installed, folder)

    (folder / "images").mkdir()
    run([installed, "-c", _WRITE_IMAGES, "images"], "write images", cwd=folder)
    run([gmmvit, "export", str(checkpoint), "-o", "bundle", "--dataset", "cifar10"], "export", cwd=folder)
    run([gmmvit, "optimize", "bundle", "--data", "folder:images"], "optimize", cwd=folder)
    classify = [gmmvit, "classify", "images", "--top", "10", "--json"]
    expected = probabilities(run([*classify, "--bundle", "bundle"], "classify in process", cwd=folder))
    if run([installed, "-c", _TOO_NEW], "compare the version of Python", cwd=folder).strip() == "True":
        return f"{len(expected)} images in process; the server of nvidia-pytriton does not run with this Python"
    differences = []
    with serving(gmmvit, folder) as urls:
        for protocol in ("grpc", "http"):
            answer = run([*classify, "--url", urls[protocol]], f"classify over {protocol}", cwd=folder)
            differences.append(largest_difference(expected, probabilities(answer), protocol))
    return f"{len(expected)} images over gRPC and HTTP, probabilities differ by at most {max(differences):.1e}"


def probabilities(answer: str) -> dict[str, dict[str, float]]:
    """Read what ``gmmvit classify --json`` prints."""
    return {
        Path(image["path"]).name: {each["label"]: each["probability"] for each in image["predictions"]}
        for image in json.loads(answer)
    }


def largest_difference(expected: Probabilities, answers: Probabilities, protocol: str) -> float:
    """Return the largest difference of a probability.

    Errors: ReleaseError beyond `TOLERANCE`, for other images or labels, and for no image at all.
    """
    if not expected or answers.keys() != expected.keys():
        raise ReleaseError(f"{protocol}: expected answers for {sorted(expected)}, got {sorted(answers)}")
    largest = 0.0
    for image, reference in expected.items():
        if answers[image].keys() != reference.keys():
            raise ReleaseError(
                f"{protocol}: {image}: expected the labels {sorted(reference)}, got {sorted(answers[image])}"
            )
        largest = max([largest, *(abs(answers[image][label] - reference[label]) for label in reference)])
    if largest > TOLERANCE:
        raise ReleaseError(
            f"{protocol}: probabilities differ from those of the bundle in process by {largest:.1e}; "
            f"expected at most {TOLERANCE:.0e}"
        )
    return largest


def _require_import_from(environment: Path, python: str, folder: Path) -> None:
    # A checkout on the import path would be tested instead of the wheel.
    code = "import gmmvit_deploy, gmmvit_cli; print(gmmvit_deploy.__file__); print(gmmvit_cli.__file__)"
    for path in run([python, "-c", code], "import the packages", cwd=folder).splitlines():
        if not Path(path).resolve().is_relative_to(environment.resolve()):
            raise ReleaseError(f"expected a package installed in {environment}, got {path}")


@contextmanager
def serving(gmmvit: str, folder: Path) -> Iterator[dict[str, str]]:
    """Serve ``folder/bundle`` on free ports with the program ``gmmvit``; yields the URLs by protocol.

    Errors: ReleaseError when the server does not start, does not stop, or leaves a process.
    """
    log = folder / "server.log"
    ports = [word for kind in ("http", "grpc", "metrics", "classify") for word in (f"--{kind}-port", "0")]
    command = [gmmvit, "serve", "bundle", "--json", "--log", str(log), *ports]
    process = subprocess.Popen(command, cwd=folder, env=clean_environment(), text=True, stdout=subprocess.PIPE)
    server = 0
    try:
        text = ""
        for line in process.stdout or ():  # ends when the process does, which gives up after 120 s
            text += line
            if line.startswith("}"):
                break
        else:
            lines = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
            raise ReleaseError("serve: ended before the server was ready", hint="\n".join(lines))
        state = json.loads(text)
        server = int(state["pid"])
        yield {"grpc": str(state["grpc"]), "http": str(state["http"])}
        process.send_signal(signal.SIGTERM)
        status = process.wait(_STOP_TIMEOUT_S)
        left = f"; server {server} runs" if Path(f"/proc/{server}").exists() else ""
        if status or left:
            raise ReleaseError(f"serve: expected status 0 and no server after SIGTERM, got {status}{left}")
    except subprocess.TimeoutExpired as exc:
        raise ReleaseError(f"serve: still runs {_STOP_TIMEOUT_S:.0f} s after SIGTERM") from exc
    finally:
        _end(process, server)


def _end(process: subprocess.Popen[str], server: int) -> None:
    """After a failure: end the command as a user does; if that is in vain, kill it and its server."""
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        with suppress(ProcessLookupError):
            if server:
                os.kill(server, signal.SIGKILL)
