"""Which hostile inputs stop a command or the server, and what is answered to them?

The inputs are lines in the tables of ``benchmarks/shared/hostile``: checkpoints, bundles, images, HTTP requests and
gRPC calls. Anyone can add a line.

- ``gmmvit export`` runs on each checkpoint, and ``gmmvit parity``, ``repository`` and ``classify --bundle`` on each
  bundle, in folders of their own.
- Images, HTTP requests and gRPC calls go to ``gmmvit serve`` with a small ViT, and images also to the front. With
  ``--gateway``, they go through the gateway, each with and without a key. Without it, Triton has no keys.

After each input, a sound request must be answered by the same processes; a service that ended is started again. The
result states for each input what was answered, and whether an input was answered that should be refused. It counts
crashes, hangs (no answer within 40 s), files outside the folders of the input, and the growth of the service's memory.

    python benchmarks/reported/hostile.py [--gateway] [--kind KIND] [--only TEXT] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.shared.hostile.bundles import BUNDLES, sound_bundle
from benchmarks.shared.hostile.case import ANSWERED, CLOSED, CRASH, FAILED, HANG, KINDS, REFUSED, Case, Outcome
from benchmarks.shared.hostile.checkpoints import CHECKPOINTS, small_checkpoint
from benchmarks.shared.hostile.commands import Sandbox, gmmvit
from benchmarks.shared.hostile.grpc_requests import GRPC
from benchmarks.shared.hostile.http_requests import HTTP, Held
from benchmarks.shared.hostile.images import IMAGES, bomb, photo
from benchmarks.shared.hostile.senders import send_call, send_held, send_images, send_requests, sound
from benchmarks.shared.hostile.service import Service
from benchmarks.shared.places import result_of
from gmmvit_deploy.bench import run_card

CASES: tuple[Case, ...] = (*CHECKPOINTS, *BUNDLES, *IMAGES, *HTTP, *GRPC)
FILES = ("checkpoint", "bundle")
"""The kinds on which commands run; the other kinds are sent to a service."""
COMMAND_S = 40.0
IDLE_S = 5.0
_HARM = (CRASH, HANG, ANSWERED, CLOSED, FAILED, REFUSED)


def recorded(case: Case, outcome: Outcome, **more: Any) -> dict[str, Any]:
    """Return the record of an input."""
    allowed = outcome.answer != ANSWERED or (case.may_be_answered and more.get("key") is not False)
    return {
        "kind": case.kind,
        "name": case.name,
        "answer": outcome.answer,
        "right": outcome.answer not in (CRASH, HANG) and allowed,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 2),
        **more,
    }


def command_lines(case: Case, path: Path, out: Path, picture: Path) -> list[list[str]]:
    """Return the commands that run on a checkpoint or a bundle.  The first command decides the answer."""
    if case.kind == "checkpoint":
        return [["export", str(path), "-o", str(out), "--input", "tensor"]]
    return [
        ["parity", str(path), "--runner", "onnxruntime"],
        ["repository", str(path), "-o", str(out)],
        ["classify", str(picture), "--bundle", str(path)],
    ]


def run_commands(cases: list[Case], folder: Path, bundle: Path) -> Iterator[dict[str, Any]]:
    """Run the commands on each checkpoint and bundle."""
    sandbox = Sandbox(folder / "commands" / "sandbox")
    picture = folder / "photo.png"
    picture.write_bytes(photo())
    # The first run compiles the kernels into the home folder.
    small_checkpoint(folder / "sound.pth")
    for number, arguments in enumerate(
        [
            ["export", str(folder / "sound.pth"), "-o", str(folder / "exported"), "--input", "tensor"],
            *command_lines(BUNDLES[0], bundle, folder / "models", picture),
        ]
    ):
        outcome, _ = gmmvit(arguments, sandbox, timeout_s=120)
        if outcome.answer != ANSWERED:
            raise SystemExit(f"sound command {number} failed: {arguments}: {outcome}")
    for case in cases:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            path = case.make(Path(own)) if case.kind == "checkpoint" else case.make(bundle, Path(own))
            files, peaks, outcomes = sandbox.files(), [], []
            for arguments in command_lines(case, path, Path(own) / "out", picture):
                outcome, peak = gmmvit(arguments, sandbox, timeout_s=COMMAND_S)
                outcomes.append(outcome)
                peaks.append(peak)
            worst = next((o for o in outcomes if o.answer in (CRASH, HANG)), outcomes[0])
            wrote = sorted(sandbox.files() - files)
            yield recorded(case, worst, peak_mb=max(peaks) >> 20, wrote=[Path(name).name for name in wrote])


def sent(service: Service, case: Case, *, key: bool) -> dict[str, Outcome]:
    """Send an input to the service; return name of the way → outcome."""
    made = case.make()
    if case.kind == "image":
        return send_images(service, made, key=key)
    if case.kind == "grpc":
        return {"grpc": send_call(service, made, key=key)}
    if isinstance(made, Held):
        return {"http": send_held(service, made, key=key)}
    return {"http": send_requests(service, made, key=key)}


def ask_service(
    cases: list[Case], service: Service, sandbox: Sandbox, memory: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Send each input, with a key and without; start a service that ended again."""
    warm_up(service)
    files, servers = sandbox.files(), service.servers()
    memory["before_mb"] = idle_memory_mb(service)
    keys = (True, False) if service.key else (True,)
    for case, key in ((case, key) for case in cases for key in keys):
        outcomes = sent(service, case, key=key)
        alive = sound(service) and servers <= service.servers()
        wrote = sorted(Path(name).name for name in sandbox.files() - files)
        worst = min(outcomes.values(), key=lambda outcome: _HARM.index(outcome.answer))
        if not alive:
            worst = Outcome(CRASH, f"the service ended; answer: {worst.answer} {worst.reason}", worst.seconds)
        yield recorded(
            case,
            worst,
            key=key if service.key else None,
            memory_mb=service.memory_bytes() >> 20,
            wrote=wrote,
            answers={way: outcome.answer for way, outcome in outcomes.items()},
        )
        if not alive:
            service.recover()
            warm_up(service)
            memory["restarts"] = memory.get("restarts", 0) + 1
            memory["before_mb"] = idle_memory_mb(service)
        if not alive or wrote:
            files, servers = sandbox.files(), service.servers()
    memory["after_mb"] = idle_memory_mb(service)


def warm_up(service: Service) -> None:
    """Send sound requests, also large images, so that the memory before is that of a server in use."""
    deadline = time.monotonic() + 60
    while not sound(service) and time.monotonic() < deadline:
        time.sleep(0.2)
    send_images(service, [bomb()] * 2, key=True)


def idle_memory_mb(service: Service) -> int:
    """Return the memory of the service after a time without requests."""
    time.sleep(IDLE_S)
    return service.memory_bytes() >> 20


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the answers of each kind, and name the inputs with a wrong outcome."""
    kinds = {
        kind: dict(Counter(record["answer"] for record in records if record["kind"] == kind))
        for kind in KINDS
        if any(record["kind"] == kind for record in records)
    }
    names = {f"{record['kind']}: {record['name']}" for record in records}
    wrong = {
        answer: [f"{r['kind']}: {r['name']}" for r in records if r["answer"] == answer and not r["right"]]
        for answer in (CRASH, HANG, ANSWERED)
    }
    wrote = [f"{r['kind']}: {r['name']}: {', '.join(r['wrote'])}" for r in records if r.get("wrote")]
    return {"inputs": len(names), "kinds": kinds, "wrong": wrong, "files_outside": wrote}


def chosen(kinds: tuple[str, ...], only: str) -> list[Case]:
    return [case for case in CASES if case.kind in kinds and only in case.name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", action="store_true", help="send the requests through the gateway")
    parser.add_argument(
        "--serve-option", action="append", default=[], help="a further option of gmmvit serve; may be repeated"
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="only inputs of this kind; may be repeated")
    parser.add_argument("--only", default="", help="only inputs with this text in their names")
    parser.add_argument("--output", type=Path, default=result_of(__file__, suffix=""), help="folder of the results")
    arguments = parser.parse_args()
    target = "gateway" if arguments.gateway else "direct"
    for name, kinds in (("commands", FILES), (target, tuple(kind for kind in KINDS if kind not in FILES))):
        cases = chosen(tuple(kind for kind in kinds if kind in (arguments.kind or KINDS)), arguments.only)
        if cases:
            run(cases, name, arguments)


def run(cases: list[Case], name: str, arguments: argparse.Namespace) -> None:
    """Send the inputs of the same way, and write a result with its run card."""
    output = arguments.output / f"{name}.json"
    with (
        run_card.written(output, Path(__file__).name, timed=False, target=name, inputs=len(cases)) as results,
        tempfile.TemporaryDirectory(prefix="gmmvit-hostile-") as temporary,
    ):
        folder = Path(temporary)
        bundle = sound_bundle(folder).path
        records: list[dict[str, Any]] = []
        memory: dict[str, Any] = {}
        for record in _records(cases, folder, bundle, memory, arguments):
            record["reason"] = record["reason"].replace(str(folder), "FOLDER")
            records.append(record)
            print(f"{record['kind']}: {record['name']}: {record['answer']}: {record['reason'][:100]}", flush=True)
        results.update(summary=summary(records), memory=memory, records=records)
    report(results, memory)


def _records(
    cases: list[Case], folder: Path, bundle: Path, memory: dict[str, Any], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    if cases[0].kind in FILES:
        yield from run_commands(cases, folder, bundle)
        return
    sandbox = Sandbox(folder / "service" / "sandbox")
    options = tuple(arguments.serve_option)
    with Service(bundle, sandbox, gateway=arguments.gateway, options=options) as service:
        yield from ask_service(cases, service, sandbox, memory)


def report(results: dict[str, Any], memory: dict[str, Any]) -> None:
    """Print what was wrong."""
    counts = results["summary"]
    print(f"{counts['inputs']} inputs, memory of the service {memory}")
    for answer, names in counts["wrong"].items():
        print(f"{answer}, not right: {len(names)}", *names, sep="\n  ")
    print(f"files outside: {len(counts['files_outside'])}", *counts["files_outside"], sep="\n  ")


if __name__ == "__main__":
    main()
