"""Does one service of ten models of different kinds lose a request or answer wrongly, under mixed load?

    vit, swin, cait       the paper's networks with Gaussian mixture masks
    timm, hf-vit, my-net  a network of timm, a folder of Hugging Face transformers, and a user's own class
    clip                  classes made of a text tower
    search                features, at POST /embed/search
    int8, cascade         choices of gmmvit optimize: int8, and int8 with float32 for uncertain images

The service is ``gmmvit serve --gateway --state``. PNG files go to /classify/NAME and /embed/NAME, and tensors to two
models by NVIDIA's ``tritonclient`` over gRPC, at times that do not depend on the answers. Every answer is compared with
PyTorch's reference outputs of the bundle that it states; of int8 and the cascade, its label is compared with that of
the same program without a server.

After a third of the time, a worker is killed with SIGKILL: a request that was on the way until every model answers
again may fail, and is counted apart; that takes at most a minute. After two thirds, ``gmmvit rollout --name`` gives a
model another bundle. A lost request, a wrong answer and a failed rollout make the result INVALID and the exit status 1.

With ``--steady``, nothing is killed and nothing rolled out. A line is fitted to memory and open descriptors of each
kind of process after the warm-up, a fifth of the time. Growth above its limit with 95 % confidence
(`benchmarks/shared/growth.py`) and a restart make the result INVALID too.

``--memory`` measures another service instead, after a minute without load: that of N ViT-S for images of 224 pixels, in
float32, with Gaussian mixture masks and random weights. The memory of a process is its proportional set size.

    python benchmarks/ten_models.py [--steady] [--minutes 10] [--rate 30] [--check] [--output RESULT]
    python benchmarks/ten_models.py --memory N [--output RESULT]
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from benchmarks.shared import run_card
from benchmarks.shared.growth import Sampler, grown
from benchmarks.shared.open_loop import KEY, Outcome, Send, open_loop
from benchmarks.shared.options import parsed, script_parser
from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.cascades import write_cascade
from gmmvit_deploy.bundle.choices import read_choices
from gmmvit_deploy.exporting.bundle_from_checkpoint import ExportOptions, bundle_from_checkpoint
from gmmvit_deploy.exporting.cascades import cascade_from_images
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.measure.statistics import nearest_rank
from gmmvit_deploy.models.sources.hints import LoadHints
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier
from gmmvit_deploy.runtimes.runners.open import open_runner
from tests.choices import chosen_bundle
from tests.conftest import cifar_options
from tests.golden_files import golden
from tests.hugging_face.folders import saved
from tests.models.families.custom.own_files import ARGUMENTS, LABELS, own_file, save_weights
from tests.random_bundles import bundle_of, random_vit
from tests.serving.commands import Serve, kinds_of, memory_mib
from tests.serving.rollout.state_service import StateService, processes

AUTHORIZATION = {"authorization": f"Bearer {KEY}"}
FAST = RunnerName.parse("openvino:int8-static")
CHOICES = {"int8": str(FAST), "cascade": f"{FAST}+fp32"}
TENSORS = ("timm", "hf-vit")
"""The models that ``tritonclient`` asks."""
KILLED, EXCHANGED, NEW = "vit", "timm", "vit"
"""The model whose worker is killed, and the model that gets the bundle of another."""
_TOLERANCE, _DEADLINE_S, _SHOWN = 1e-4, 30.0, 20
_REST_S = 60.0
"""The time without requests before memory is measured; a decoder that is not needed ends after 30 s."""
_WARM_UP_SHARE, _MIN_SAMPLES = 0.2, 30
"""The share of a steady run before growth counts; on a busy machine, the run goes on until it has the samples."""
_STARTED_ONCE = ("tritonserver", "haproxy", "front")
_RESTART_S, _READY_S = 300.0, 60.0
"""The seconds after the kill for which the run waits, and within which all models must answer again."""


def _golden(name: str, folder: Path, out: Path, **options: Any) -> Bundle:
    case = golden(name)
    return bundle_from_checkpoint(case.path, out, cifar_options(**options), hints=case.hints)


def _hugging_face(name: str, folder: Path, out: Path, **hints: Any) -> Bundle:
    return bundle_from_checkpoint(saved(name, folder / f"{name}-files"), out, ExportOptions(), hints=LoadHints(**hints))


def _own_class(folder: Path, out: Path) -> Bundle:
    source = own_file(folder)
    save_weights(source, folder / "net.pth", **ARGUMENTS)
    hints = LoadHints(model=f"{source}:Net", model_args=ARGUMENTS, image_size=16, channels=3)
    options = cifar_options(labels=tuple(LABELS.split(",")), resize="stretch-bilinear")
    return bundle_from_checkpoint(folder / "net.pth", out, options, hints=hints)


def _chosen(folder: Path, out: Path) -> Bundle:
    """Copy the bundle of ViT with a choice: int8, or a cascade that computes about a third of its images again."""
    base = folder / "chosen"
    if not base.exists():
        shutil.copytree(folder / "vit", base)
        coarse = np.random.default_rng(5).integers(0, 256, (96, 4, 4, 3), dtype=np.uint8)
        for name, images in (("calibration", coarse[:48]), ("threshold", coarse[48:])):
            np.savez(folder / f"{name}.npz", images=images.repeat(8, axis=1).repeat(8, axis=2))
        variant_from_bundle(base, "int8", calibration=str(folder / "calibration.npz"))
        bundle = open_bundle(base)
        with open_runner(FAST, bundle) as fast, open_runner("openvino", bundle) as exact:
            record = cascade_from_images(bundle, fast, exact, str(folder / "threshold.npz"), keep_decisions=0.9)
        write_cascade(bundle, FAST, replace(record, threshold=float(np.quantile(record.margins, 1 / 3))))
    return chosen_bundle(open_bundle(base), out, CHOICES[out.name])


MODELS: dict[str, Callable[[Path, Path], Bundle]] = {
    "vit": partial(_golden, "vit_gmm"),
    "swin": partial(_golden, "swin_gmm"),
    "cait": partial(_golden, "cait_gmm"),
    "timm": partial(_golden, "timm_vit"),
    "hf-vit": partial(_hugging_face, "vit"),
    "my-net": _own_class,
    "clip": partial(_hugging_face, "clip_model", labels=("a cat", "a dog", "a fox"), prompts=("a photo of {}",)),
    "search": partial(_golden, "vit_gmm", outputs="features", normalise=True, labels=None),
    "int8": _chosen,
    "cascade": _chosen,
}
"""Name → writes the bundle; the folder is for the files that it needs."""
CHECKED = ("vit", "timm", "hf-vit", "search")
"""The models of a run with ``--check``."""


def written_bundles(folder: Path, names: Iterable[str] = MODELS) -> dict[str, Bundle]:
    folder.mkdir(exist_ok=True)
    return {name: MODELS[name](folder, folder / name) for name in names}


def expected_rows(bundle: Bundle) -> np.ndarray:
    """Return the outputs for the golden images (I, …): PyTorch's, or those of the choice without a server."""
    stored = bundle.golden_set()
    if not read_choices(bundle.path)[0]:
        return stored.image_logits
    with BundleClassifier(bundle) as local:
        return local.answers(stored.images, [stored.output])[stored.output]


class Asked:
    """A model that clients ask.  answered: SHA-256 of a bundle → its answers."""

    def __init__(self, name: str, bundles: Sequence[Bundle]) -> None:
        """Compute what is right.  bundles: those that the model may have, with the same golden images."""
        self.name, self.bundles = name, {bundle.sha256: bundle for bundle in bundles}
        self._stored = [bundle.golden_set() for bundle in bundles]
        self._rows = {bundle.sha256: expected_rows(bundle) for bundle in bundles}
        self._chosen = name in CHOICES
        self.answered = Counter[str]()
        first = self._stored[0]
        for other in self._stored[1:]:
            if other.images != first.images or not np.array_equal(other.inputs, first.inputs):
                raise SystemExit(f"{name}: the bundles have other golden images")

    def png(self, client: httpx.AsyncClient) -> Send:
        """Return a sender of PNG files to /classify or /embed."""
        images, numbers = self._stored[0].images, count()
        path = f"/{'classify' if self._stored[0].output == 'logits' else 'embed'}/{self.name}"

        async def send(deadline_s: float) -> str:
            row = next(numbers) % len(images)
            try:
                answer = await client.post(path, content=images[row], timeout=deadline_s)
            except httpx.HTTPError as exc:
                return f"{type(exc).__name__}: {exc}"
            return (
                self._judged(row, answer.json()) if answer.status_code == 200 else f"{answer.status_code} {answer.text}"
            )

        return send

    def _judged(self, row: int, body: Mapping[str, Any]) -> str:
        bundle = self.bundles.get(body["bundle"])
        if bundle is None:
            return f"WRONG bundle {body['bundle']}"
        self.answered[bundle.sha256] += 1
        rows = self._rows[bundle.sha256][row]
        if "features" in body:
            off = float(np.abs(np.frombuffer(base64.b64decode(body["features"][0]), "<f4") - rows).max())
            return "OK" if off <= _TOLERANCE else f"WRONG features of image {row}: off by {off:.2g}"
        (right,), actual = bundle.manifest.label_set.predictions(rows, 1), body["predictions"][0][0]
        same = self._chosen or abs(actual["probability"] - right.probability) <= _TOLERANCE
        return "OK" if same and actual["label"] == right.label else f"WRONG: image {row}: {actual}, expected {right}"

    def tensors(self, client: triton.InferenceServerClient) -> Send:
        """Return a sender of tensors to the network, over gRPC."""
        inputs, numbers = self._stored[0].inputs, count()

        async def send(deadline_s: float) -> str:
            row = next(numbers) % len(inputs)
            tensor = triton.InferInput("pixels", [1, *inputs.shape[1:]], "UINT8")
            tensor.set_data_from_numpy(inputs[row : row + 1])
            try:
                answer = await client.infer(
                    f"{self.name}_network", [tensor], headers=AUTHORIZATION, client_timeout=deadline_s
                )
            except InferenceServerException as exc:
                return str(exc)
            logits = answer.as_numpy("logits")[0]
            offs = [np.abs(logits - each.logits[row]).max() / np.abs(each.logits[row]).max() for each in self._stored]
            return "OK" if min(offs) <= _TOLERANCE else f"WRONG logits of input {row}: off by {min(offs):.2g}"

        return send


def due(rate: float, seed: int, ended: Callable[[], bool]) -> Iterator[float]:
    """Yield the times of independent requests, in seconds, until the end."""
    generator, at = np.random.default_rng(seed), 0.0
    while not ended():
        yield (at := at + generator.exponential(1 / rate))


async def killed(service: StateService, sends: Sequence[Send]) -> None:
    """Kill the worker of a network, and wait until every model answers again."""
    kind = f"worker {KILLED}_network"
    old = processes(service, kind)
    os.kill(min(old), signal.SIGKILL)
    async with asyncio.timeout(_RESTART_S):
        while not processes(service, kind) - old:
            await asyncio.sleep(0.2)
        while any([await send(_DEADLINE_S) != "OK" for send in sends]):
            await asyncio.sleep(0.2)


async def rolled_out(service: StateService, bundle: Bundle) -> str:
    """Type ``gmmvit rollout``, and return what it prints if it fails."""
    words = ("rollout", bundle.path, "--to", service.state, "--name", EXCHANGED)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gmmvit_cli.main", *map(str, words)), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    return errors.decode() if process.returncode else ""


async def disturbed(service: StateService, bundle: Bundle, sends: Sequence[Send], seconds: float) -> dict[str, Any]:
    """Kill a worker after a third of the time, and roll out a bundle after two thirds; return how long both took."""
    started = time.perf_counter()
    await asyncio.sleep(seconds / 3)
    kill = time.perf_counter() - started
    await killed(service, sends)
    ready = time.perf_counter() - started
    print(f"killed a worker; all models answered again after {ready - kill:.1f} s", flush=True)
    await asyncio.sleep(max(0.0, 2 * seconds / 3 - ready))
    rollout = time.perf_counter()
    failed = await rolled_out(service, bundle)
    rollout_s = time.perf_counter() - rollout
    print(f"rollout: {failed or 'promoted'} after {rollout_s:.1f} s", flush=True)
    return {
        "killed": {"model": KILLED, "at_s": kill, "until_ready_s": ready - kill},
        "rollout": {"model": EXCHANGED, "seconds": rollout_s, "failed": failed},
    }


async def loaded(
    service: StateService, bundles: Mapping[str, Bundle], seconds: float, rate: float, steady: Sampler | None
) -> dict[str, Any]:
    """Load all models for some seconds; return the counts and the times.

    steady: samples the service, and nothing is killed and rolled out; None for a run with both.
    """
    models = {name: Asked(name, [bundle]) for name, bundle in bundles.items()}
    models[EXCHANGED] = Asked(EXCHANGED, [bundles[EXCHANGED], bundles[NEW]])
    grpc = triton.InferenceServerClient(service.where["grpc"].removeprefix("grpc://"))
    async with httpx.AsyncClient(base_url=service.where["http"], headers=AUTHORIZATION, trust_env=False) as http:
        pngs = {f"{name}, PNG": model.png(http) for name, model in models.items()}
        sends = {**pngs, **{f"{name}, tensors": models[name].tensors(grpc) for name in TENSORS}}
        ended, each = asyncio.Event(), rate / len(sends)
        loads = [
            asyncio.create_task(open_loop(send, due(each, seed, ended.is_set), deadline_s=_DEADLINE_S))
            for seed, send in enumerate(sends.values())
        ]
        started = time.perf_counter()
        happened = {} if steady else await disturbed(service, bundles[NEW], list(pngs.values()), seconds)
        await asyncio.sleep(max(1 / each, started + seconds - time.perf_counter()))
        while steady and len(steady.times) < _MIN_SAMPLES:
            await asyncio.sleep(1)
        ended.set()
        outcomes = dict(zip(sends, await asyncio.gather(*loads), strict=True))
    await grpc.close()
    seconds = time.perf_counter() - started
    kill = ready = 0.0
    if happened:
        kill = happened["killed"]["at_s"]
        ready = kill + happened["killed"]["until_ready_s"]
        happened["answers_of_new_bundle"] = models[EXCHANGED].answered[bundles[NEW].sha256]
    return {
        **happened,
        "models": {name: counted(rows, kill, ready, seconds) for name, rows in outcomes.items()},
    }


def counted(outcomes: Sequence[Outcome], kill: float, ready: float, seconds: float) -> dict[str, Any]:
    """Count the outcomes of a stream of requests; kill, ready: the times between which a request may fail."""
    answered = [1000 * each.seconds for each in outcomes if each.status == "OK"]
    wrong = [each.status for each in outcomes if each.status.startswith("WRONG")]
    failed = [each for each in outcomes if each.status != "OK" and not each.status.startswith("WRONG")]
    lost = [each.status for each in failed if each.due_s > ready or each.due_s + each.seconds < kill]
    return {
        "requests": len(outcomes),
        "answers_per_second": len(answered) / seconds,
        "p50_ms": nearest_rank(answered, 0.5) if answered else None,
        "p99_ms": nearest_rank(answered, 0.99) if answered else None,
        "in_flight_at_the_kill": len(failed) - len(lost),
        "lost": len(lost),
        "wrong": len(wrong),
        "examples": [text[:200] for text in (*lost[:_SHOWN], *wrong[:_SHOWN])],
    }


def problems(result: Mapping[str, Any]) -> list[str]:
    """Return what a service promises and did not keep, and what the run did not show."""
    rows = result["models"].items()
    reasons = [
        f"{name}: {row[kind]} requests were {kind}" for name, row in rows for kind in ("lost", "wrong") if row[kind]
    ]
    reasons += [f"{name}: no answer" for name, row in rows if not row["answers_per_second"]]
    reasons += [f"{kind} was started {count} times" for kind, count in result.get("started", {}).items() if count > 1]
    if "killed" not in result:
        return reasons
    if (until_ready_s := result["killed"]["until_ready_s"]) > _READY_S:
        reasons.append(f"after the kill, all models answered again only after {until_ready_s:.0f} s")
    if result["rollout"]["failed"]:
        reasons.append(f"the rollout failed: {result['rollout']['failed']}")
    elif not result["answers_of_new_bundle"]:
        reasons.append("the new bundle answered no request")
    return reasons


def memory_of_vit_s(count: int, folder: Path) -> dict[str, Any]:
    """Serve as many ViT-S, and return the memory of each kind of process after a minute without requests, in MiB."""
    sizes = {"dim": 384, "head_dim": 64, "mlp_dim": 1536, "heads": 6, "depth": 12, "patch_size": 16, "image_size": 224}
    bundle = bundle_of(random_vit(**sizes), folder)
    memory: dict[str, list[float]] = {}
    with Serve(None, *(f"vit{number}={bundle.path}" for number in range(count)), stderr=subprocess.DEVNULL) as service:
        where = service.ready()
        time.sleep(_REST_S)
        for pid, kind in kinds_of(service.process.pid).items():
            memory.setdefault(re.sub("vit[0-9]+", "vit", kind), []).append(memory_mib(pid, ("Pss:",)))
    total = sum(map(sum, memory.values()))
    weights = bundle.onnx_path.stat().st_size / 2**20
    for kind, of_processes in memory.items():
        print(f"{kind}: {len(of_processes)} x {np.mean(of_processes):.0f} MiB")
    print(f"{count} models ({where['models'][0]['runner']}), each with {weights:.0f} MiB of weights: {total:.0f} MiB")
    return {"memory_mib": memory, "total_mib": total, "weights_mib": weights}


def main() -> None:
    parser = script_parser(__doc__, __file__)
    parser.add_argument("--memory", type=int, default=0, metavar="N", help="only measure the memory of N ViT-S")
    parser.add_argument("--steady", action="store_true", help="kill and roll out nothing; judge the growth of memory")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second of all clients")
    arguments = parsed(parser, minutes=0.1)
    if arguments.memory:
        output = arguments.output.with_stem(f"{arguments.output.stem}_memory")
        card = run_card.written(output, Path(__file__).name, timed=False, models=arguments.memory, rest_s=_REST_S)
        with card as results, tempfile.TemporaryDirectory() as temporary:
            results |= memory_of_vit_s(arguments.memory, Path(temporary))
        return
    settings = {"minutes": arguments.minutes, "rate": arguments.rate, "steady": arguments.steady}
    output, seconds = arguments.output, 60 * arguments.minutes
    if arguments.steady:
        output = output.with_stem(f"{output.stem}_steady")
    card = run_card.written(output, Path(__file__).name, timed=False, **settings)
    with card as results, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundles = written_bundles(folder, CHECKED if arguments.check else MODELS)
        (folder / "keys").write_text(f"benchmark {KEY}\n", encoding="utf-8")
        named = [f"{name}={bundle.path}" for name, bundle in bundles.items()]
        with (
            StateService(folder, folder / "keys", *named) as service,
            Sampler(service.process.pid, interval_s=min(5.0, seconds / 40)) as sampler,
        ):
            steady = sampler if arguments.steady else None
            results |= asyncio.run(loaded(service, bundles, seconds, arguments.rate, steady))
        series = {"memory_mib": sampler.memory, "descriptors": sampler.descriptors}
        results |= {what: {kind: (of[kind][0], of[kind][-1]) for kind in of} for what, of in series.items()}
        if arguments.steady:
            results["started"] = {kind: len(sampler.processes[kind]) for kind in _STARTED_ONCE}
            results["growth"] = sampler.growths(after=sampler.times[0] + _WARM_UP_SHARE * seconds)
        results["problems"] = problems(results)
        if arguments.steady and not arguments.check:  # the growth of some seconds is that of the start
            results["problems"] += grown(results["growth"])
        for name, row in results["models"].items():
            print(name, *(f"{what} {value}" for what, value in row.items()), sep="; ")
        for what, of in series.items():
            first, last = (sum(values[index] for values in of.values()) for index in (0, -1))
            print(f"{what} of all processes: {first:.0f} at the start, {last:.0f} at the end")
    if results["problems"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
