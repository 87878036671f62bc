"""Run a graph on an execution provider of ONNX Runtime, and prove which provider runs each node.

An execution provider is the part of ONNX Runtime that computes on a device. ONNX Runtime runs the nodes that a provider
does not support on the CPU, and the whole graph if the provider does not start; the only sign is a line on stderr. This
module reads the provider of each node from the session, and refuses a session that would compute on the CPU.
"""

from __future__ import annotations

import ctypes
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gmmvit_deploy.errors import BundleError, RunnerUnavailableError
from gmmvit_deploy.graphs.role_patterns import size_values
from gmmvit_deploy.inference.onnxruntime_program import session_options
from gmmvit_deploy.runtimes.programs.onnxruntime import import_onnxruntime, require_onnxruntime

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray


CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
_LIBRARIES = {CUDA: "libonnxruntime_providers_cuda.so", TENSORRT: "libonnxruntime_providers_tensorrt.so"}
_SHARED = "libonnxruntime_providers_shared.so"  # the other libraries use its symbols
_TENSORRT_DISTRIBUTIONS = tuple(
    f"tensorrt{cuda}{part}" for cuda in ("", "-cu13", "-cu12") for part in ("", "-libs", "-bindings")
)
_RECORD = "session.record_ep_graph_assignment_info"
_FATAL, _WARNING = 4, 2


class Placement(NamedTuple):
    """The provider of each node, after ONNX Runtime's optimisations that no provider takes part in.

    first: the provider that was asked for the nodes first.
    nodes: provider → (name, operator) of each node.
    parts: provider → number of parts of the graph that the provider got; TensorRT compiles a part to an engine.
    """

    first: str
    nodes: Mapping[str, Sequence[tuple[str, str]]]
    parts: Mapping[str, int]

    def to_text(self) -> dict[str, str]:
        """Return ``nodes on PROVIDER`` → number of nodes, in all and of each operator.

        The nodes of other providers than the first are also named, so that the provider of every node is stated.
        """
        return {f"nodes on {provider}": self._line(provider) for provider in sorted(self.nodes)}

    def _line(self, provider: str) -> str:
        nodes, parts = self.nodes[provider], self.parts[provider]
        compiled = f" in {parts} {'part' if parts == 1 else 'parts'}" if parts < len(nodes) else ""
        names = "" if provider == self.first else f" ({', '.join(name for name, _ in nodes)})"
        return f"{len(nodes)}{compiled}: {_operators(nodes)}{names}"


def _operators(nodes: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{count} {operator}" for operator, count in Counter(kind for _, kind in nodes).most_common())


def require_provider(provider: str) -> Any:
    """Return the module of ONNX Runtime if its package has the provider, and the provider's libraries load.

    Errors: as `import_onnxruntime`.
    RunnerUnavailableError when the package has no such provider, when a library of CUDA, cuDNN, TensorRT or the driver
    is missing, or when TensorRT has another major version than the provider was built for.
    """
    onnxruntime = import_onnxruntime()
    if provider not in onnxruntime.get_available_providers():
        raise RunnerUnavailableError(
            f"{require_onnxruntime()} has no {provider}",
            hint="type pip uninstall -y onnxruntime, then pip install 'gmmvit-deploy[gpu]', to install onnxruntime-gpu",
        )
    if provider in _LIBRARIES:
        _require_libraries(onnxruntime, Path(onnxruntime.__file__).parent / "capi", provider)
    return onnxruntime


def _require_libraries(onnxruntime: Any, folder: Path, provider: str) -> None:
    library = folder / _LIBRARIES[provider]
    major = str(onnxruntime.cuda_version).partition(".")[0]
    if provider == TENSORRT:
        _require_tensorrt(library, major)
    with redirect_stdout(io.StringIO()):  # prints what it does not find
        onnxruntime.preload_dlls()
    try:
        ctypes.CDLL(str(folder / _SHARED), mode=ctypes.RTLD_GLOBAL)
        for loaded in (CUDA, provider):  # CUDA runs the nodes that TensorRT does not support
            ctypes.CDLL(str(folder / _LIBRARIES[loaded]))
    except OSError as exc:
        raise RunnerUnavailableError(
            f"{provider} of {require_onnxruntime()} cannot be loaded: {exc}", hint=_fix(str(exc), library, major)
        ) from exc


def _fix(reason: str, library: Path, cuda: str) -> str:
    if "libcuda.so" in reason:
        return "install NVIDIA's driver; nvidia-smi then lists the GPUs"
    if "libnvinfer" in reason or "libnvonnxparser" in reason:
        return f"type pip install 'tensorrt-cu{cuda}=={_needed_tensorrt(library)}.*'"
    return f"type pip install 'gmmvit-deploy[gpu]', which also installs libraries of CUDA {cuda} and cuDNN"


def _needed_tensorrt(library: Path) -> int:
    """Return the major version of TensorRT that the provider is linked with: 10 for ``libnvinfer.so.10``."""
    match = re.search(rb"libnvinfer\.so\.(\d+)", library.read_bytes())
    return int(match.group(1)) if match else 10


def installed_tensorrt() -> tuple[str, str]:
    """Return (distribution, version) of the installed TensorRT, or two empty strings without a distribution."""
    for name in _TENSORRT_DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            return name, version(name)
    return "", ""


def _require_tensorrt(library: Path, cuda: str) -> None:
    """Load the libraries of TensorRT's Python package, if installed; a system may have them without the package.

    Errors: RunnerUnavailableError when the package has another major version than the provider needs.
    """
    needed = _needed_tensorrt(library)
    name, there = installed_tensorrt()
    if there and int(there.partition(".")[0]) != needed:
        raise RunnerUnavailableError(
            f"{TENSORRT} of {require_onnxruntime()} needs TensorRT {needed}, and {name} {there} is installed",
            hint=f"type pip install 'tensorrt-cu{cuda}=={needed}.*' in another environment; here, type gmmvit build "
            "and --runner tensorrt to run an engine without ONNX Runtime",
        )
    if there:
        with suppress(ImportError, OSError):  # the library of the provider then names what is missing
            import_module("tensorrt")


def session_on_providers(
    graph: Path | bytes, name: str, providers: Mapping[str, Mapping[str, str]]
) -> tuple[Any, Placement]:
    """Open a graph as an ``onnxruntime.InferenceSession`` whose nodes all run on the given providers.

    Nodes that compute nothing but sizes, from outputs of Shape, may run on the CPU: ONNX Runtime places them there,
    because sizes are read on the CPU.
    graph: the graph's file, or the serialised graph.  name: in error messages.
    providers: provider → options; of several providers, the first that supports a node runs the node.
    Errors: as `import_onnxruntime`; call `require_provider` first, for errors that name what is missing.
    RunnerUnavailableError when the first provider does not start or gets no node, when another provider got a node, or
    when this ONNX Runtime does not state the provider of each node.
    BundleError when ONNX Runtime cannot load the graph.
    """
    onnxruntime = import_onnxruntime()
    options = session_options(None)
    options.add_session_config_entry(_RECORD, "1")
    with _quiet(onnxruntime):
        try:
            session = onnxruntime.InferenceSession(
                str(graph) if isinstance(graph, Path) else graph,
                options,
                [*providers],
                [dict(values) for values in providers.values()],
                enable_fallback=0,
            )
        # ONNX Runtime raises a dozen unrelated exception classes for graphs that it cannot load.
        except Exception as exc:
            raise BundleError(f"{name}: ONNX Runtime {onnxruntime.__version__} cannot load this graph: {exc}") from exc
    first = next(iter(providers))
    if first not in session.get_providers():
        raise RunnerUnavailableError(
            f"{name}: ONNX Runtime did not start {first} on this machine, and would have run the graph on the CPU",
            hint="type nvidia-smi to list the GPUs that the driver sees",
        )
    placement = _placement(session, first)
    _require_placement(placement, graph, name, providers)
    return session, placement


@contextmanager
def _quiet(onnxruntime: Any) -> Iterator[None]:
    """Keep ONNX Runtime from writing to stdout and stderr what the raised errors state."""
    onnxruntime.set_default_logger_severity(_FATAL)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        onnxruntime.set_default_logger_severity(_WARNING)


def _placement(session: Any, first: str) -> Placement:
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise RunnerUnavailableError(
            f"{require_onnxruntime()} does not state which provider runs each node; ONNX Runtime 1.24 or newer does",
            hint="type pip install --upgrade 'gmmvit-deploy[gpu]'",
        )
    nodes: dict[str, list[tuple[str, str]]] = {}
    parts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        parts[part.ep_name] += 1
        nodes.setdefault(part.ep_name, []).extend((node.name, node.op_type) for node in part.get_nodes())
    return Placement(first, nodes, parts)


def _require_placement(placement: Placement, graph: Path | bytes, name: str, providers: Mapping[str, object]) -> None:
    import onnx
    import onnx_ir as ir

    first = placement.first
    model = ir.from_proto(onnx.load_from_string(graph)) if isinstance(graph, bytes) else ir.load(graph)
    sizes = _size_nodes(model.graph)
    elsewhere = [
        node
        for provider, nodes in placement.nodes.items()
        if provider not in providers
        for node in nodes
        if provider != CPU or node[0] not in sizes
    ]
    every = sum(map(len, placement.nodes.values()))
    if elsewhere:
        raise RunnerUnavailableError(
            f"{name}: {first} runs {len(placement.nodes.get(first, ()))} of {every} nodes, and {len(elsewhere)} would "
            f"run on the CPU: {_operators(elsewhere)}",
            hint="type --runner onnxruntime to run the graph on the CPU, or choose another precision",
        )
    if not placement.nodes.get(first):
        raise RunnerUnavailableError(
            f"{name}: {first} runs no node of the graph: {'; '.join(map(': '.join, placement.to_text().items()))}",
            hint="leave this runner out",
        )


def _size_nodes(graph: ir.Graph) -> set[str]:
    """Return the names of the nodes that compute sizes, and nothing else."""
    sizes = size_values(graph)
    return {node.name for node in graph if node.name and sizes.issuperset(node.outputs)}


class BoundProgram:
    """A network that ``run(batch)`` computes on a device.

    With I/O binding, inputs and outputs keep their memory on the device; the first batch of each size allocates it. Not
    for several threads at the same time.
    """

    def __init__(self, session: Any, *, memory: str) -> None:
        """Keep the session.  memory: the device of inputs and outputs in ONNX Runtime, ``cuda`` or ``cpu``."""
        self._session = session
        self._memory = memory
        self._bindings: dict[int, tuple[Any, Any]] = {}

    def run(self, batch: NDArray[Any]) -> NDArray[Any]:
        """Return the first output, float32 (B, C), for a batch of the graph's input (B, …)."""
        return self.answers(batch)[0]

    def answers(self, batch: NDArray[Any]) -> list[NDArray[Any]]:
        """Return all outputs, each float32 (B, …), for a batch of the graph's input (B, …)."""
        import numpy as np

        if len(batch) not in self._bindings:
            self._bindings[len(batch)] = self._bound(batch)
        binding, value = self._bindings[len(batch)]
        value.update_inplace(np.ascontiguousarray(batch))
        binding.synchronize_inputs()
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        # On a CPU, the arrays are views of the bound memory, which the next run overwrites.
        return [np.array(answer) for answer in binding.copy_outputs_to_cpu()]

    def _bound(self, batch: NDArray[Any]) -> tuple[Any, Any]:
        """Return (input and outputs in the memory of the device, bound to the session, the value of the input)."""
        import numpy as np

        make = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type
        binding = self._session.io_binding()
        value = make(list(batch.shape), batch.dtype, self._memory, 0)
        binding.bind_ortvalue_input(self._session.get_inputs()[0].name, value)
        for output in self._session.get_outputs():
            shape = [len(batch), *output.shape[1:]]
            binding.bind_ortvalue_output(output.name, make(shape, np.float32, self._memory, 0))
        return binding, value
