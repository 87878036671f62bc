"""Run a TensorRT engine as a runner, so that parity and benchmarks use engines like every other runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gmmvit_deploy.bundle.variants import open_variant
from gmmvit_deploy.errors import EngineError
from gmmvit_deploy.runtimes.engines.card import Engine, require_bundle
from gmmvit_deploy.runtimes.engines.compatibility import loads_in, runs_on
from gmmvit_deploy.runtimes.engines.flavors import find_flavor, visible_gpu
from gmmvit_deploy.runtimes.engines.session import PlanSession
from gmmvit_deploy.runtimes.runners.inspection import stand_in
from gmmvit_deploy.runtimes.runners.runner import Inspection, Runner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gmmvit_deploy.bundle.artifacts import Bundle


class EngineRunner(Runner):
    """Runs a TensorRT engine on this machine's GPU.

    Errors: EngineError when the engine was built from another bundle, or cannot run with the installed TensorRT or on
    this machine's GPU.
    MissingDependencyError when TensorRT is not installed.
    """

    device = "gpu"

    def __init__(self, bundle: Bundle, engine: Engine) -> None:
        super().__init__(bundle)
        card = engine.card
        self.name, self.precision = card.flavor, card.precision
        self.max_batch = card.max_batch
        require_bundle(bundle, engine)
        gpu = visible_gpu()
        reason = loads_in(card, find_flavor(card.flavor).version) or (runs_on(card, gpu) if gpu else "")
        if reason:
            raise EngineError(
                f"{engine.path}: {reason}", hint="type gmmvit build on this machine to build the engine again"
            )
        self.card = card
        self._session = PlanSession(
            card.flavor,
            engine.plan_path.read_bytes(),
            tensor=str(card.tensor["name"]),
            dtype=str(card.tensor["dtype"]),
            profile_of=card.profile_for,
            host_code=bool(card.flags["version_compatible"]),
        )

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(minimum, maximum) batch size of each optimisation profile."""
        return tuple((profile.minimum, profile.maximum) for profile in self.card.profiles)

    @property
    def settings(self) -> dict[str, str]:
        profiles = " ".join(map(str, self.card.profiles))
        flags = {name: str(value) for name, value in self.card.flags.items() if value}
        return {"profiles": profiles, "CUDA graphs": "on", **flags}

    def _program_provenance(self) -> dict[str, str]:
        return {f"{name} SHA-256": value for name, value in self.card.sha256.items()}

    def inspectable(self) -> Inspection:
        return stand_in(open_variant(self.bundle, self.precision), f"{self.name} cannot be inspected")

    def _check(self, batch: NDArray[Any]) -> None:
        self.card.profile_for(len(batch))  # raises an error that lists the profiles
        super()._check(batch)

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        return self._session.run(batch)

    def close(self) -> None:
        """Release the GPU's memory."""
        self._session.close()
