"""Open a runner by its name.

A runner is a runtime, engine or server that computes the logits. ``onnxruntime`` and ``openvino`` run a graph of the
bundle unchanged, with the runtime's built-in operators. ``openvino+kernels`` runs the graph with this project's CPU
kernels, ``onnxruntime-cuda`` and ``onnxruntime-tensorrt`` run it on a GPU. A precision may follow each of these five
names (`RunnerName`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from gmmvit_deploy.bundle.artifacts import Bundle, open_bundle
from gmmvit_deploy.bundle.variants import Variant, cpu_form, open_variant, record_of
from gmmvit_deploy.errors import InputError, RunnerUnavailableError
from gmmvit_deploy.inference.precision import ONNXRUNTIME_PRECISIONS, Precision, graph_precision
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.engines.card import open_engine
from gmmvit_deploy.runtimes.engines.flavors import FLAVORS
from gmmvit_deploy.runtimes.programs.access import NO_ACCESS, Access, protocol_of
from gmmvit_deploy.runtimes.programs.openvino import kernels_for_graph, read_graph, why_no_openvino
from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL
from gmmvit_deploy.runtimes.runners._engine import EngineRunner
from gmmvit_deploy.runtimes.runners._openvino import OpenVinoRunner
from gmmvit_deploy.runtimes.runners.cascade import CascadeRunner
from gmmvit_deploy.runtimes.runners.eager import CompiledRunner, EagerRunner
from gmmvit_deploy.runtimes.runners.names import DEFAULT_URLS, ON_CPUS, ON_GPUS, RUNNERS, runner_from
from gmmvit_deploy.runtimes.runners.onnxruntime import OnnxRuntimeRunner, cuda_runner, tensorrt_runner
from gmmvit_deploy.runtimes.runners.runner import Runner
from gmmvit_deploy.runtimes.runners.triton import TritonRunner

_OF_THE_MODULE = {"eager": EagerRunner, "compile": CompiledRunner}
_OF_A_GPU = {"onnxruntime-cuda": cuda_runner, "onnxruntime-tensorrt": tensorrt_runner}
_OF_GRAPHS = tuple(name for name in RUNNERS if name in (*ON_CPUS, *ON_GPUS))
_PRECISION_ONLY_FOR = f"only {', '.join(_OF_GRAPHS)} take a precision"


def default_runners(bundle: Bundle, precision: Precision = "fp32") -> tuple[list[str], list[str]]:
    """Return (names of the runners to check by default, a reason for each runner that is left out).

    These are ONNX Runtime, and OpenVINO with our kernels, or without if no kernel computes a part of the graph.
    Errors: as `open_variant`.  RunnerUnavailableError when no runner computes in this precision here.
    """
    graph = _graph_for_cpus(bundle, precision)
    wrong = _wrong_runners(bundle, graph, precision)
    why_not = [f"onnxruntime: {wrong['onnxruntime']}"] if "onnxruntime" in wrong else []
    runs = precision in ONNXRUNTIME_PRECISIONS and not graph.only_openvino and not why_not
    names = ["onnxruntime"] if runs else []
    name, why = _in_openvino(graph, precision, wrong)
    why_not += [why] if why else []
    if not names and not name:
        raise RunnerUnavailableError(
            f"no runner of this machine computes in {precision}: {'; '.join(why_not)}",
            hint="choose fp32 or int8, which run on every x86 CPU" if precision == "bf16" else "",
        )
    return [*names, *([name] if name else [])], why_not


def fastest_runner(bundle: Bundle, precision: Precision = "fp32") -> tuple[str, str]:
    """Return (the runner that is usually the fastest on a CPU, the reason why a faster one cannot run here, or "")."""
    graph = _graph_for_cpus(bundle, precision)
    name, why = _in_openvino(graph, precision, _wrong_runners(bundle, graph, precision))
    return name or "onnxruntime", why


def _wrong_runners(bundle: Bundle, graph: Variant, precision: Precision) -> dict[str, str]:
    """Return the runners that export or conversion left out because they are wrong, with the reasons."""
    record = graph.record or record_of(bundle, precision)
    programs = record.programs if record is not None else {}
    manifest = bundle.manifest
    of_export = manifest.wrong_runners if graph.precision == "fp32" else ()
    return {name: manifest.export_skipped[name] for name in of_export} | {
        name: str(entry["skipped"]) for name, entry in programs.items() if entry.get("wrong")
    }


def _in_openvino(graph: Variant, precision: Precision, wrong: Mapping[str, str]) -> tuple[str, str]:
    """Return (the runner of OpenVINO, or "" if none can run the graph, why the runner or its kernels cannot run)."""
    if why := why_no_openvino(precision, dynamic=graph.form == "dynamic"):
        return "", why
    path = graph.path
    ours, why = kernels_for_graph(path, precision)
    if "openvino+kernels" in wrong:
        why = wrong["openvino+kernels"]
    elif ours is not None:
        return "openvino+kernels", ""
    if "openvino" in wrong:
        return "", f"openvino: {wrong['openvino']}"
    try:
        read_graph(path)
    except RuntimeError as exc:
        return "", f"openvino: cannot read {path.name}: {exc}"
    return "openvino", f"openvino+kernels: {why}" if why else ""


def proof_programs(bundle: Bundle, variant: Variant) -> dict[str, Callable[[], Runner]]:
    """Return name of the CPU runner → function that opens the runner in the precision of ``variant``.

    The runners do not compare themselves with the golden outputs, as the caller does.
    The functions raise RunnerUnavailableError for a runner that is not available in this precision.
    variant: its file may lie outside the bundle. For bf16, OpenVINO runs the bundle's float32 graph.
    """
    read = cache(read_graph)  # both runners of OpenVINO run the same graph

    def openvino(*, kernels: bool) -> Runner:
        precision = graph_precision(variant.precision)
        graph = variant if precision == variant.precision else open_variant(bundle, precision)
        return OpenVinoRunner(bundle, graph, precision=variant.precision, kernels=kernels, read=read)

    def judged(opened: Callable[[], Runner]) -> Runner:
        runner = opened()
        runner.judged = True
        return runner

    programs: dict[str, Callable[[], Runner]] = {
        "onnxruntime": lambda: OnnxRuntimeRunner(bundle, variant=variant),
        "openvino": partial(openvino, kernels=False),
        "openvino+kernels": partial(openvino, kernels=True),
    }
    return {name: partial(judged, opened) for name, opened in programs.items()}


def open_runner(
    name: str | RunnerName,
    bundle: Bundle | Path | str,
    *,
    url: str | None = None,
    model: str = DEFAULT_MODEL,
    access: Access = NO_ACCESS,
    engine: Path | str | None = None,
    precision: Precision = "fp32",
    takes_other_bundle: bool = False,
    threads: int = 0,
) -> Runner:
    """Open a runner by its name, and close it at the end of a ``with`` block.

    Example: ``open_runner("openvino:bf16", "bundle").run(images)``, with ``images`` as in `Runner`.

    name: of `RUNNERS`, with a precision if it is not float32, such as ``openvino:bf16``.
    url: address of a Triton server; the protocol must match the runner's name.  model: name of the server's ensemble.
    engine: folder of an engine, for the runners ``tensorrt`` and ``tensorrt-rtx``.
    precision: of a name without a precision. For bf16, OpenVINO runs the float32 graph.
    takes_other_bundle: as in `TritonRunner`.  threads: of ONNX Runtime or OpenVINO on a CPU; 0 uses a thread per core.
    Errors: InputError when the name is unknown, or when an option does not fit the runner.
    RunnerUnavailableError when the name ends in ``+kernels`` and this project's CPU kernels are not available, or when
    ONNX Runtime cannot run the graph on the GPU.
    Every other error that the runner raises when it opens.
    """
    bundle = open_bundle(bundle)
    runner = runner_from(name, precision=precision) if isinstance(name, str) else name
    name = runner.name
    if name in DEFAULT_URLS:
        address = url or DEFAULT_URLS[name]
        protocol = name.removeprefix("triton-")
        if protocol_of(address) != protocol:
            raise InputError(f"runner {name}: expected a {protocol}:// address, or {protocol}s://, got {address}")
        return TritonRunner(bundle, address, model=model, access=access, takes_other_bundle=takes_other_bundle)
    if url is not None:
        raise InputError(f"runner {name} runs in this process; only triton-grpc and triton-http take a url")
    if (engine is not None) != (name in FLAVORS):
        raise InputError(f"runner {name} {'needs an' if name in FLAVORS else 'takes no'} engine")
    if runner.precision != "fp32" and name not in _OF_GRAPHS:
        raise InputError(f"runner {name} has a fixed precision; {_PRECISION_ONLY_FOR}")
    if engine is not None:
        opened = open_engine(Path(engine))
        if opened.card.flavor != name:
            raise InputError(f"{engine}: expected an engine of {name}, got an engine of {opened.card.flavor}")
        return EngineRunner(bundle, opened)
    of_module = _OF_THE_MODULE.get(name.removesuffix("-gpu"))
    if of_module is not None:
        return of_module(bundle, device="gpu" if name.endswith("-gpu") else "cpu")
    if runner.cascade:
        fast, exact = runner.stages
        first = open_runner(fast, bundle, threads=threads)
        return CascadeRunner(first, open_runner(exact, bundle, threads=threads))
    graph = graph_of(bundle, runner)
    if name in _OF_A_GPU:
        return _OF_A_GPU[name](bundle, graph)
    if runner.runtime == "openvino":
        return OpenVinoRunner(bundle, graph, precision=runner.precision, threads=threads, kernels=runner.kernels)
    return OnnxRuntimeRunner(bundle, variant=graph, threads=threads)


def graph_of(bundle: Bundle, runner: RunnerName) -> Variant:
    """Open the graph that a runner loads.  Errors: as `open_variant`."""
    precision = graph_precision(runner.precision) if runner.runtime == "openvino" else runner.precision
    if runner.name in ON_CPUS:
        return open_variant(bundle, precision, runner.form or cpu_form(bundle, precision))
    return open_variant(bundle, precision)


def _graph_for_cpus(bundle: Bundle, precision: Precision) -> Variant:
    precision = graph_precision(precision)
    return open_variant(bundle, precision, cpu_form(bundle, precision))


@contextmanager
def open_runners(
    names: Sequence[str],
    bundle: Bundle,
    *,
    urls: Sequence[str] = (),
    model: str = DEFAULT_MODEL,
    access: Access = NO_ACCESS,
    engine: Path | None = None,
    precision: Precision = "fp32",
    takes_other_bundle: bool = False,
) -> Iterator[list[Runner]]:
    """Open several runners with the options that apply to each runner, and close all runners at the end.

    urls: addresses of Triton servers, at most one for each protocol.
    precision: of ONNX Runtime and OpenVINO if the runner's name contains no precision.
    takes_other_bundle: as in `TritonRunner`, so that parity can report another bundle instead of raising an error.
    Errors: InputError when a runner is named twice, or when an option applies to no runner.
    """
    requested = [_with_precision(name, precision) for name in names]
    bare = [runner.name for runner in requested]
    if repeated := sorted({str(runner) for runner in requested if requested.count(runner) > 1}):
        raise InputError(f"runner {', '.join(repeated)} is named more than once")
    by_protocol = {protocol_of(url): url for url in urls}
    if len(by_protocol) < len(urls):
        raise InputError(f"got {len(urls)} addresses of servers; expected one for each protocol")
    idle = [url for protocol, url in by_protocol.items() if f"triton-{protocol}" not in bare]
    if idle and not any(name in DEFAULT_URLS for name in bare):
        raise InputError(f"runner {', '.join(bare)} runs in this process; only triton-grpc and triton-http take a url")
    if idle:
        raise InputError(f"{idle[0]}: no runner uses the protocol of this address; the runners are {', '.join(bare)}")
    if engine is not None and not set(bare) & set(FLAVORS):
        raise InputError(f"runner {', '.join(bare)} takes no engine; only {' and '.join(FLAVORS)} take one")
    if precision != "fp32" and not set(bare) & set(_OF_GRAPHS):
        raise InputError(f"runner {', '.join(bare)} has a fixed precision; {_PRECISION_ONLY_FOR}")
    with ExitStack() as stack:
        opened = []
        for runner_name in requested:
            name = runner_name.name
            runner = open_runner(
                runner_name,
                bundle,
                url=by_protocol.get(name.removeprefix("triton-")) if name in DEFAULT_URLS else None,
                model=model,
                access=access,
                engine=engine if name in FLAVORS else None,
                takes_other_bundle=takes_other_bundle,
            )
            opened.append(stack.enter_context(runner))
        yield opened


def _with_precision(text: str, precision: Precision) -> RunnerName:
    """Read a runner's name; a name without a precision gets ``precision``, if the runner takes one."""
    runner = runner_from(text)
    return runner_from(text, precision=precision) if runner.name in _OF_GRAPHS else runner
