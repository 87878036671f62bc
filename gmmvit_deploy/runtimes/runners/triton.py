"""Run the network of a running Triton server over gRPC or HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gmmvit_deploy.bundle.cascades import read_cascade
from gmmvit_deploy.bundle.variants import cpu_form, open_variant
from gmmvit_deploy.errors import BundleError, NotOfferedError, ServerError
from gmmvit_deploy.inference import DEFERRED
from gmmvit_deploy.inference.precision import graph_precision
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.precision_names import precision_from
from gmmvit_deploy.runtimes.programs.access import NO_ACCESS, Access
from gmmvit_deploy.runtimes.programs.triton import DEFAULT_MODEL, TritonConnection
from gmmvit_deploy.runtimes.runners.inspection import stand_in
from gmmvit_deploy.runtimes.runners.runner import Inspection, Runner, Served

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle
    from gmmvit_deploy.bundle.variants import Variant
    from gmmvit_deploy.inference.precision import Precision


class TritonRunner(Runner):
    """Calls the network of a bundle on a server, as clients do."""

    callers = 16
    server: Served

    def __init__(
        self,
        bundle: Bundle,
        url: str,
        *,
        model: str = DEFAULT_MODEL,
        access: Access = NO_ACCESS,
        takes_other_bundle: bool = False,
    ) -> None:
        """Connect to a server and check that the server serves this bundle.

        No request is repeated, so that parity and bench see every refusal of an overloaded server.
        model: name of the ensemble.
        takes_other_bundle: accept a network that was made from another bundle with the same input and labels.
        ``server.other_bundle`` then describes the mismatch.
        Errors: ServerError when the server does not answer, or does not have the network.
        BundleError when the network was made from another bundle.
        """
        super().__init__(bundle)
        self._connection = TritonConnection(url, access=access)
        self.name = f"triton-{self._connection.protocol}"
        # tritonclient's HTTP client uses gevent. gevent moves stacks, and crashes if a stack contains C++ frames.
        self.needs_own_thread = self._connection.protocol == "http"
        self._network = f"{model}_network"
        self._input = bundle.manifest.input_kind
        try:
            served = self._connection.model(self._network)
        except ServerError:
            self._connection.close()
            raise
        other_bundle = ""
        if served.bundle_sha256 != bundle.sha256:
            source = f"bundle {served.bundle_sha256[:12]}…" if served.bundle_sha256 else "an unknown bundle"
            other_bundle = f"{url} serves {self._network} from {source}, not from {bundle.path} ({bundle.sha256[:12]}…)"
            alike = (served.inputs, served.outputs, served.label_set) == (
                {self._input: bundle.input_shape},
                self.outputs,
                bundle.manifest.label_set,
            )
            if not (takes_other_bundle and alike):
                self._connection.close()
                raise BundleError(
                    other_bundle, hint="write the repository again from this bundle and restart the server"
                )
        self.server = Served(
            connection=self._connection,
            network=self._network,
            ensemble=model,
            preprocess=f"{model}_preprocess",
            other_bundle=other_bundle,
            output=self.outputs[0],
        )
        self.precision = precision_from(served.precision)
        self.device = "gpu" if served.on_gpu else "cpu"
        if not served.on_gpu:
            self.form = RunnerName.parse(served.runner).form or cpu_form(bundle, self.precision)
        if not other_bundle and RunnerName.parse(served.runner).cascade:
            runner = RunnerName.parse(served.runner)
            self.record = read_cascade(bundle, runner, self._graph(graph_precision(self.precision)).sha256)
        self._settings = dict(served.settings)
        self.max_batch = min(self.max_batch, served.max_batch)

    @property
    def settings(self) -> dict[str, str]:
        """The network's settings, as the server reports them."""
        return self._settings

    def _program_provenance(self) -> dict[str, str]:
        try:
            version = f"Triton {self._connection.version()}"
        except NotOfferedError:  # a gateway may offer inference only
            version = "Triton, version not offered,"
        return {"server": f"{version} at {self._connection.url}", "model": self._network}

    def inspectable(self) -> Inspection:
        return stand_in(self._graph(self.precision), f"{self.name} cannot be inspected")

    def _graph(self, precision: Precision) -> Variant:
        return open_variant(self.bundle, precision, self.form)

    def run_all(self, batch: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        if self.record is None:
            return super().run_all(batch)
        self._require(batch)
        names = (*self.outputs, DEFERRED)
        answers = self._connection.infer_all(self._network, self._input, batch, outputs=names)
        return dict(zip(names, answers, strict=True))

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        return self._connection.infer(self._network, self._input, batch, output=self.outputs[0])

    def _run_all(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        return self._connection.infer_all(self._network, self._input, batch, outputs=self.outputs)

    def close(self) -> None:
        self._connection.close()
