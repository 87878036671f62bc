"""Run the trained PyTorch module, rebuilt from the bundle, in eager mode or compiled, on the CPU or a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gmmvit_deploy.errors import InputError
from gmmvit_deploy.inference.cores import cores, is_limited
from gmmvit_deploy.runtimes.runners.runner import Device, Inspection, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from gmmvit_deploy.bundle.artifacts import Bundle


class EagerRunner(Runner):
    """Runs the trained module without folding or export, as a reference.  The masks are computed as in training.

    If the bundle's input is ``pixels``, numpy normalises the images, so that the normalisation in the exported graph is
    compared with an independent implementation. On a GPU, TF32 is off.
    """

    name = "eager"

    def __init__(self, bundle: Bundle, *, device: Device = "cpu") -> None:
        """Errors: BundleError when the weights do not match the manifest; InputError without a GPU for ``gpu``."""
        from gmmvit_deploy.checkpoints.weights import model_from_bundle

        super().__init__(bundle)
        limit_torch()
        self.device = device
        if device == "gpu":
            self.name = f"{self.name}-gpu"
            _require_gpu(self.name)
        self._place = "cuda" if device == "gpu" else "cpu"
        self.model = model_from_bundle(bundle.manifest, bundle.weights_path).to(self._place)
        self._weights_sha256 = bundle.manifest.files[bundle.weights_path.name]
        self._image = bundle.manifest.image
        self._takes_pixels = bundle.manifest.input_kind == "pixels"

    def tensors(self, batch: NDArray[Any]) -> Tensor:
        """Convert a batch of the graph's input to a normalised float32 tensor (B, channels, height, width)."""
        import torch

        if self._takes_pixels:
            batch = self._image.tensor_from_pixels(batch)
        return torch.from_numpy(batch).to(self._place)

    @property
    def settings(self) -> dict[str, str]:
        import torch

        return {"threads": str(torch.get_num_threads())} if self.device == "cpu" else {"TF32": "off"}

    def _program_provenance(self) -> dict[str, str]:
        return {"weights SHA-256": self._weights_sha256}

    def inspectable(self) -> Inspection:
        return Inspection(None, f"{self.name} runs the trained module, not the bundle's graph")

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        logits: NDArray[Any] = self._computed(self.model, batch).cpu().numpy()
        return logits

    def _run_all(self, batch: NDArray[Any]) -> Sequence[NDArray[Any]]:
        return [answer.cpu().numpy() for answer in self._computed(self.model.answers, batch)]

    def _computed(self, model: Callable[[Tensor], Any], batch: NDArray[Any]) -> Any:
        import torch

        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return model(self.tensors(batch))


def _require_gpu(name: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            f"runner {name}: PyTorch {torch.__version__} sees no GPU",
            hint="type nvidia-smi to list the GPUs that the driver sees; without a GPU, leave this runner out",
        )


class CompiledRunner(EagerRunner):
    """Runs the trained module through ``torch.compile``.  On a CPU, ``torch.compile`` needs a C++ compiler.

    The batch dimension is dynamic, so that a batch of another size starts no further compilation.
    """

    name = "compile"

    def __init__(self, bundle: Bundle, *, device: Device = "cpu") -> None:
        """Errors: as `EagerRunner`.  InputError when ``torch.compile`` fails on this machine."""
        import numpy as np
        import torch

        super().__init__(bundle, device=device)
        self._compiled = torch.compile(self.model, dynamic=True)
        try:
            self._run(np.zeros((min(2, self.max_batch), *self.input_shape), self.input_dtype))
        # torch.compile raises its own exceptions, and passes on exceptions of compilers and of the operating system.
        except Exception as exc:
            reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
            raise InputError(
                f"runner {self.name}: torch.compile {torch.__version__} fails on this machine: {reason}",
                hint="install a C++ compiler such as g++, or leave this runner out",
            ) from exc

    def _run(self, batch: NDArray[Any]) -> NDArray[Any]:
        logits: NDArray[Any] = self._computed(self._compiled, batch).cpu().numpy()
        return logits


def limit_torch() -> None:
    """Reduce the number of PyTorch's threads to the number of cores if the quota allows fewer than the affinity."""
    if is_limited():
        import torch

        if torch.get_num_threads() > cores():
            torch.set_num_threads(cores())
