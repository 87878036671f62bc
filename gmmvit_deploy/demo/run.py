"""Run the whole workflow with the real components: train, export, build, serve, check parity, measure."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmmvit_deploy.bench import page as bench_page
from gmmvit_deploy.bench.cells import Plan
from gmmvit_deploy.bench.run import BenchOptions, bench
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.demo.models import DemoModel, OwnModel, train
from gmmvit_deploy.errors import ExportError, GmmvitError, MissingDependencyError
from gmmvit_deploy.exporting.bundle_from_checkpoint import bundle_from_checkpoint
from gmmvit_deploy.exporting.fastest import record_fastest
from gmmvit_deploy.exporting.variants import variant_from_bundle
from gmmvit_deploy.files.writing import new_folder, require_free
from gmmvit_deploy.graphs.roles import require_known_roles
from gmmvit_deploy.images.data.formats import digits
from gmmvit_deploy.images.data.images import Images
from gmmvit_deploy.images.data.open import open_data
from gmmvit_deploy.images.spec import ImageSpec, image_from_pixels
from gmmvit_deploy.models.specs import MaskKind
from gmmvit_deploy.parity import page as parity_page
from gmmvit_deploy.parity.check import check_parity
from gmmvit_deploy.parity.options import ParityOptions
from gmmvit_deploy.parity.report import ParityReport
from gmmvit_deploy.progress import OnProgress, Progress, ignore
from gmmvit_deploy.runtimes.engines.engine_from_onnx import engine_from_bundle
from gmmvit_deploy.runtimes.engines.flavors import find_flavor
from gmmvit_deploy.runtimes.engines.options import BuildOptions
from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier, Classification, TritonClassifier, classify_files
from gmmvit_deploy.runtimes.runners.open import default_runners, open_runners
from gmmvit_deploy.serving.installs import find_server
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.repository import repository_from_bundle
from gmmvit_deploy.serving.server import ServerOptions, TritonServer

_MIN_TOP1 = 0.95
_BUILT_FOR = "8.9"
_SERVED = ("triton-grpc", "triton-http")
_BENCH_PLAN = Plan(batches=(1, 32), rounds=6, seconds=0.7)
_BENCH = (
    f"gmmvit bench bundle --runner {{}} --batch {','.join(map(str, _BENCH_PLAN.batches))} "
    f"--data digits --rounds {_BENCH_PLAN.rounds} --seconds {_BENCH_PLAN.seconds:g} --report bench.html"
)
_PARITY = "gmmvit parity bundle --runner {} --data digits --localize --report parity.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStep:
    """A finished step of the demo: its result in words, and the command that runs it without the demo."""

    name: str
    result: str
    seconds: float
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The result of the demo.

    path: the folder with all output.  top1: program → accuracy on the held-out digits, from 0 to 1.
    """

    path: Path
    checkpoint: Path
    steps: tuple[DemoStep, ...]
    top1: dict[str, float]


def run_demo(
    out: Path,
    *,
    force: bool = False,
    tritonserver: Path | None = None,
    model: str | None = None,
    mask: MaskKind = "gmm",
    on_progress: OnProgress = ignore,
) -> DemoResult:
    """Run the demo and write all output to ``out``.  After an error, nothing is written to ``out``.

    tritonserver: the server program; None searches for one.
    model: an architecture of timm, with or without ``timm:``; None trains this project's ViT.
    Errors: GmmvitError when a step or parity fails, or when accuracies are too low or differ; MissingDependencyError;
    InputError when timm has no such architecture, or the model does not take the mask.
    """
    require_free(out, force=force)
    origin = _model(model, mask)
    # Fail before the training if there is no server.
    install = find_server(tritonserver, on_progress=on_progress)
    demo = _Demo(on_progress)
    with new_folder(out, force=force) as folder:
        checkpoint, images = folder / origin.checkpoint, folder / "images"
        with demo.step("train", ""):
            seen, held_out = digits("train"), digits("test")
            network = train(origin, seen, epochs=origin.epochs, on_progress=on_progress)
            origin.save(network, checkpoint, epoch=origin.epochs)
            save_images(images, held_out, origin.png)
            demo.note(f"{origin.title} on {len(seen)} digits; {len(held_out)} held out")
        with demo.step("inspect", f"gmmvit inspect {origin.checkpoint}{origin.typed_hints}"):
            loaded = load_checkpoint(checkpoint, origin.hints)
            demo.note(f"{loaded.spec.description}, {loaded.spec.mask}, {loaded.trainable_parameters:,} parameters")
        options = f"{origin.typed_hints}{origin.typed_options}"
        with demo.step("export", f"gmmvit export {origin.checkpoint} -o bundle{options}"):
            bundle = bundle_from_checkpoint(checkpoint, folder / "bundle", origin.export_options, hints=origin.hints)
            record_fastest(bundle)
            demo.note(f"{_folded(bundle)} folded; the input of model.onnx is uint8 pixels")
        with demo.step("convert", "gmmvit convert bundle --precision fp16"):
            demo.note(_converted(bundle))
        mask_cost = " --mask-cost" if bundle.manifest.masks else ""
        with demo.step("build", f"gmmvit build bundle --compute-capability {_BUILT_FOR}{mask_cost}"):
            demo.note(_built(bundle, origin))
        top1: dict[str, float] = {}
        with demo.step("classify", "gmmvit classify images --bundle bundle"):
            with BundleClassifier(bundle) as classifier:
                share = _top1(classify_files(classifier, sorted(images.glob("*/*.png")), top=1))
                top1[classifier.runner] = share
            demo.note(f"top-1 {share:.1%} in process")
        _judge(top1)  # fail before serving if the training failed
        with demo.step("repository", "gmmvit repository bundle -o model_repository"):
            served = RepositoryOptions(backend=install.best_backend)
            repository = repository_from_bundle(bundle, folder / "model_repository", served)
            demo.note(f"{', '.join(repository.models)} ({served.backend} backend, runner {repository.runner})")
        ports = ServerOptions(http_port=0, grpc_port=0, metrics_port=0, log_path=folder / "tritonserver.log")
        server = TritonServer(repository.path, install=install, options=ports)
        with demo.step("serve", "gmmvit serve model_repository"):
            server.start()
            demo.note(f"Triton is ready, {len(repository.models)} models")
        in_process, skipped = default_runners(bundle)
        names = ["eager", *in_process, *_SERVED]
        try:
            with demo.step("parity", _PARITY.format(",".join(names))):
                report = _parity(bundle, names, skipped, server, folder / "parity.html")
                top1 |= _accuracies(report)
                demo.note(f"{len(report.runners)} runners; {report.runners[-1].check('numeric').summary}")
            for protocol, url in (("grpc", server.grpc_url), ("http", server.http_url)):
                with demo.step(f"classify {protocol}", f"gmmvit classify images --url {protocol}://localhost:…"):
                    with TritonClassifier(url, model=DEFAULT_MODEL) as remote:
                        answers = classify_files(remote, sorted(images.glob("*/*.png")), top=1)
                    top1[f"Triton, {protocol}"] = _top1(answers)
                    demo.note(f"top-1 {top1[f'Triton, {protocol}']:.1%} on PNG bytes")
            _judge(top1)  # do not measure programs whose accuracies are too low or differ
            with demo.step("bench", _BENCH.format(",".join(names))):
                demo.note(_benched(bundle, names, server, folder / "bench.html"))
        finally:
            server.stop()
    return DemoResult(path=out, checkpoint=out / origin.checkpoint, steps=tuple(demo.steps), top1=top1)


def _model(name: str | None, mask: MaskKind) -> DemoModel[Any]:
    if name is None:
        return OwnModel(mask)
    from gmmvit_deploy.demo._timm_model import DemoTimmModel

    return DemoTimmModel(name, mask)


class _Demo:
    """Collects the finished steps.  Use: ``with demo.step(...): … demo.note(...)``."""

    def __init__(self, on_progress: OnProgress) -> None:
        self.steps: list[DemoStep] = []
        self._on_progress, self._result = on_progress, ""

    @contextmanager
    def step(self, name: str, command: str) -> Iterator[None]:
        self._on_progress(Progress(name))
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.steps.append(DemoStep(name=name, result=self._result, seconds=seconds, command=command))

    def note(self, result: str) -> None:
        self._result = result


def _folded(bundle: Bundle) -> str:
    manifest = bundle.manifest
    counts = [f"{len(manifest.masks)} masks"] if manifest.masks or not manifest.biases else []
    return " and ".join(counts + ([f"{len(manifest.biases)} biases"] if manifest.biases else []))


def _fp16_missing(bundle: Bundle) -> str:
    import onnx_ir as ir

    try:
        require_known_roles(ir.load(bundle.onnx_path).graph, "fp16", what="model.onnx")
    except ExportError as exc:
        return str(exc)
    return ""


def _converted(bundle: Bundle) -> str:
    if reason := _fp16_missing(bundle):
        return f"skipped: {reason}"
    record = variant_from_bundle(bundle, "fp16").record
    return f"logits differ by {record.golden['largest_abs']:.1e}" if record else ""


def _built(bundle: Bundle, origin: DemoModel[Any]) -> str:
    """Build an engine for a GPU that this machine may lack; return a summary, or why there is no engine."""
    try:
        flavor = find_flavor("tensorrt-rtx")
    except MissingDependencyError as exc:
        return f"skipped: {exc}"
    if _fp16_missing(bundle):
        return "skipped: the engine of the demo needs the fp16 graph"
    strict = origin.every_attention_fused
    options = BuildOptions(precision="fp16", capabilities=(_BUILT_FOR,), require_fused=strict, require_precision=strict)
    has_masks = bool(bundle.manifest.masks)
    card = engine_from_bundle(bundle, open_variant(bundle, "fp16"), options, flavor, mask_cost=has_masks).card
    cost = card.mask_cost
    extra = f"; the masks add {cost.kernels - cost.twin_kernels} kernels" if cost else ""
    fused = sum(attention.fused for attention in card.attentions)
    if fused < len(card.attentions):
        return f"{fused} of {len(card.attentions)} attentions are each a single fp16 kernel{extra}"
    return f"each of the {fused} attentions is a single fp16 kernel{extra}"


def save_images(folder: Path, images: Images, png: ImageSpec) -> None:
    """Write images as PNG files, in a folder for each class."""
    for number in range(len(images)):
        target = folder / str(images.label(number))
        target.mkdir(parents=True, exist_ok=True)
        image_from_pixels(images.pixels(number, png)).save(target / f"{number:03d}.png")


def _parity(
    bundle: Bundle, names: Sequence[str], skipped: Sequence[str], server: TritonServer, page: Path
) -> ParityReport:
    options = ParityOptions(data=open_data("digits"), localize=True)
    with open_runners(names, bundle, urls=(server.grpc_url, server.http_url)) as runners:
        report = check_parity(bundle, runners, options, skipped=skipped)
    parity_page.write_page(report, page)
    if report.failed:
        raise GmmvitError(f"parity failed: {report.failures()[0]}")
    return report


def _benched(bundle: Bundle, names: Sequence[str], server: TritonServer, page: Path) -> str:
    options = BenchOptions(plan=_BENCH_PLAN, data=open_data("digits"))
    try:
        with open_runners(names, bundle, urls=(server.grpc_url, server.http_url)) as runners:
            report = bench(bundle, runners, options)
        bench_page.write_page(report.to_json(), page)
    except MissingDependencyError as exc:
        return f"skipped: {exc}"
    if report.wrong:
        raise GmmvitError(f"bench: {report.wrong[0]}")
    rates = {cell.runner: cell.samples_per_second for cell in report.cells if cell.scenario == "Offline"}
    listed = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    return f"images a second: {listed}; {report.verdict}{f': {report.reasons[0]}' if report.reasons else ''}"


def _accuracies(report: ParityReport) -> dict[str, float]:
    top1 = {runner.runner.name: runner.check("accuracy").details["top1"] for runner in report.runners}
    return {f"{name}, by parity": numbers["runner"] for name, numbers in top1.items()}


def _top1(answers: Sequence[Classification]) -> float:
    failed = [f"{answer.path}: {answer.error}" for answer in answers if answer.error]
    if failed:
        raise GmmvitError(f"{len(failed)} images were not classified; the first of them: {failed[0]}")
    return sum(a.predictions[0].label == a.path.parent.name for a in answers) / len(answers)


def _judge(top1: dict[str, float]) -> None:
    for (name, a), (other, b) in itertools.pairwise(top1.items()):
        if a != b:
            raise GmmvitError(
                f"the top-1 accuracies on the held-out digits must be equal: {name} has {a:.2%}, {other} has {b:.2%}"
            )
    if min(top1.values()) < _MIN_TOP1:
        raise GmmvitError(f"the trained model has top-1 {min(top1.values()):.2%}; expected at least {_MIN_TOP1:.0%}")
