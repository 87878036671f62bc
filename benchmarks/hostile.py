"""Which hostile inputs stop a command or the server, and what is answered to them?

The inputs are lines in the tables of ``tests/hostile``. ``gmmvit export`` runs on each checkpoint, and ``gmmvit
parity``, ``repository`` and ``classify --bundle`` on each bundle. Images, HTTP requests and gRPC calls go to ``gmmvit
serve`` with a small ViT, and images also to the front; with ``--gateway``, through the gateway, each with and without a
key. With ``--unprotected``, also the stacks of the server's threads are those that Linux gives by default. With
``--ten-models``, the small ViT is one of ten models behind the gateway (``ten_models.py``), images go to three of them,
and at the end each model must give right answers.

After each input, the same processes must answer a sound request. If a process has ended, each of the last inputs is
sent alone to a fresh service, and is a crash if it ends the service alone. The result states each answer, and whether
an input was answered that should be refused; it counts crashes, hangs (no answer within 40 s, nor within 160 s to the
same input again), files outside the folders of the input, and the memory after each round of all inputs.

    python benchmarks/hostile.py [--gateway | --ten-models | --unprotected] [--rounds N] [--kind KIND] [--only TEXT]
        [--check]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.hostile_service.asking import PATIENCE, Asker, recorded
from benchmarks.hostile_service.service import Service
from benchmarks.shared import run_card
from benchmarks.shared.options import parsed, script_parser
from benchmarks.ten_models import written_bundles
from gmmvit_deploy.bundle.artifacts import open_bundle
from tests.hostile.bundles import BUNDLES, sound_bundle
from tests.hostile.case import ANSWERED, CRASH, HANG, KINDS, Case
from tests.hostile.checkpoints import CHECKPOINTS, small_checkpoint
from tests.hostile.commands import Sandbox, gmmvit
from tests.hostile.grpc_requests import GRPC
from tests.hostile.http_requests import HTTP
from tests.hostile.images import IMAGES, photo
from tests.serving.test_many_models import require_right_answers

CASES: tuple[Case, ...] = (*CHECKPOINTS, *BUNDLES, *IMAGES, *HTTP, *GRPC)
FILES = ("checkpoint", "bundle")
"""The kinds on which commands run; the other kinds are sent to a service."""
COMMAND_S = 40.0


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
        outcome = gmmvit(arguments, sandbox, timeout_s=900)
        if outcome.answer != ANSWERED:
            raise SystemExit(f"sound command {number} failed: {arguments}: {outcome}")
    for case in cases:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            path = case.make(Path(own)) if case.kind == "checkpoint" else case.make(bundle, Path(own))
            files, outcomes = sandbox.files(), []
            for arguments in command_lines(case, path, Path(own) / "out", picture):
                outcome = gmmvit(arguments, sandbox, timeout_s=COMMAND_S)
                if outcome.answer == HANG:
                    outcome = gmmvit(arguments, sandbox, timeout_s=COMMAND_S * PATIENCE)
                outcomes.append(outcome)
            worst = next((o for o in outcomes if o.answer in (CRASH, HANG)), outcomes[0])
            wrote = sorted(sandbox.files() - files)
            record = recorded(case, worst, wrote=[Path(name).name for name in wrote])
            state(record)
            yield record


def ask_service(cases: list[Case], asker: Asker, rounds: int) -> list[dict[str, Any]]:
    """Send each input, with a key and without, in rounds; return the records of the first round.

    A record has ``later`` if the answer of a later round differs.
    """
    asker.begin()
    keys = (True, False) if asker.service.key else (True,)
    asked: list[list[dict[str, Any]]] = []
    for _ in range(rounds):
        asked.append([])
        for case, key in ((case, key) for case in cases for key in keys):
            asked[-1].append(asker.ask(case, key=key))
            state(asked[-1][-1])
        asker.end_round()
    for first, *later in zip(*asked, strict=True):
        for record in later:
            if record["answer"] != first["answer"]:
                first["later"] = record["answer"]
            first["right"] = first["right"] and record["right"]
    return asked[0]


def state(record: dict[str, Any]) -> None:
    print(f"{record['kind']}: {record['name']}: {record['answer']}: {record['reason'][:100]}", flush=True)


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the answers of each kind, and name the inputs with a wrong outcome."""
    kinds = {
        kind: dict(Counter(record["answer"] for record in records if record["kind"] == kind))
        for kind in KINDS
        if any(record["kind"] == kind for record in records)
    }
    names = {f"{record['kind']}: {record['name']}" for record in records}
    wrong = {
        answer: sorted(
            {
                f"{r['kind']}: {r['name']}"
                for r in records
                if answer in (r["answer"], r.get("later")) and (answer != ANSWERED or not r["right"])
            }
        )
        for answer in (CRASH, HANG, ANSWERED)
    }
    wrote = [f"{r['kind']}: {r['name']}: {', '.join(r['wrote'])}" for r in records if r.get("wrote")]
    return {"inputs": len(names), "kinds": kinds, "wrong": wrong, "files_outside": wrote}


def chosen(kinds: tuple[str, ...], only: list[str]) -> list[Case]:
    """Return the inputs of these kinds, with one of these texts in their names if there are texts."""
    return [case for case in CASES if case.kind in kinds and (not only or any(text in case.name for text in only))]


def main() -> None:
    parser = script_parser(__doc__, __file__, suffix="")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--gateway", action="store_true", help="send the requests through the gateway")
    way.add_argument(
        "--ten-models", action="store_true", help="send them through the gateway of a service of ten models"
    )
    way.add_argument("--unprotected", action="store_true", help="give the server's threads a stack of 8 MiB")
    parser.add_argument("--rounds", type=int, default=1, help="send all requests so many times to the same service")
    parser.add_argument(
        "--serve-option", action="append", default=[], help="a further option of gmmvit serve; may be repeated"
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="only inputs of this kind; may be repeated")
    parser.add_argument(
        "--only", action="append", default=[], help="only inputs with this text in their names; may be repeated"
    )
    arguments = parsed(parser, kind=["http"], only=["unknown input"])
    ways = [way for way in ("gateway", "ten_models", "unprotected") if getattr(arguments, way)]
    target = ways[0] if ways else "direct"
    for name, kinds in (("commands", FILES), (target, tuple(kind for kind in KINDS if kind not in FILES))):
        cases = chosen(tuple(kind for kind in kinds if kind in (arguments.kind or KINDS)), arguments.only)
        if cases:
            run(cases, name, arguments)


def run(cases: list[Case], name: str, arguments: argparse.Namespace) -> None:
    """Send the inputs of the same way, and write a result with its run card."""
    output = arguments.output / f"{name}.json"
    with (
        run_card.written(
            output, Path(__file__).name, timed=False, target=name, inputs=len(cases), rounds=arguments.rounds
        ) as results,
        tempfile.TemporaryDirectory(prefix="gmmvit-hostile-") as temporary,
    ):
        folder = Path(temporary)
        bundle = sound_bundle(folder).path
        records, more = _records(cases, folder, bundle, arguments)
        for record in records:
            record["reason"] = record["reason"].replace(str(folder), "FOLDER")
        results.update(summary=summary(records), **more, records=records)
    report(results)


def _records(
    cases: list[Case], folder: Path, bundle: Path, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if cases[0].kind in FILES:
        return list(run_commands(cases, folder, bundle)), {}
    options = tuple(arguments.serve_option)
    sandbox = Sandbox(folder / "service" / "sandbox")
    ten = written_bundles(folder / "ten") if arguments.ten_models else {}
    ten.pop("vit", None)  # the small ViT has its place
    with Service(
        bundle,
        sandbox,
        gateway=arguments.gateway or arguments.ten_models,
        protected=not arguments.unprotected,
        options=options,
        beside={name: each.path for name, each in ten.items()},
    ) as service:
        asker = Asker(service, sandbox)
        records = ask_service(cases, asker, arguments.rounds)
        if ten:
            url = "http://{}:{}".format(*service.address("/"))
            require_right_answers(url, {**ten, "gmmvit": open_bundle(bundle)}, dict(service.metadata(key=True)))
        return records, {"memory": asker.memory, "ended_together": asker.ended_together}


def report(results: dict[str, Any]) -> None:
    """Print what was wrong."""
    counts = results["summary"]
    print(f"{counts['inputs']} inputs; memory of the service {results.get('memory')}")
    for answer, names in counts["wrong"].items():
        print(f"{answer}, not right: {len(names)}", *names, sep="\n  ")
    print("ended after inputs that end no service alone:", *results.get("ended_together", []), sep="\n  ")
    print(f"files outside: {len(counts['files_outside'])}", *counts["files_outside"], sep="\n  ")


if __name__ == "__main__":
    main()
