"""Biases: steps that add a matrix B to the scores, S' = S + B."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gmmvit_deploy.errors import FoldError
from gmmvit_deploy.models.scores.step import (
    Add,
    Constant,
    Grid,
    Multiply,
    Oddity,
    Step,
    StepNumbers,
    lattice_points,
    rows_and_columns,
)

_OUTSIDE = -100.0  # Swin's released code adds −100 to the score of two tokens that are neighbours only after the roll


def relative_position_index(window: int) -> Int[Tensor, "n n"]:
    """Return index[i,j]: the row of the bias table for the offset between tokens i and j of a window."""
    lattice = torch.arange(window)
    rows, columns = torch.meshgrid(lattice, lattice, indexing="ij")
    points = torch.stack([rows.flatten(), columns.flatten()])
    offsets = points[:, :, None] - points[:, None, :] + window - 1
    return offsets[0] * (2 * window - 1) + offsets[1]


def shift_mask(grid: int, window: int, shift: int) -> Float[Tensor, "windows n n"]:
    """Return what Swin adds to the scores of two tokens of a window of a rolled image: −100 across the image's edge."""
    edges = torch.arange(grid)
    # The bands of a side: windows before the last one, the rest of the last window, and the part that was rolled over.
    band = (edges >= grid - window).long() + (edges >= grid - shift).long()
    region = band[:, None] * 3 + band[None, :]
    side = grid // window
    windows = region.reshape(side, window, side, window).transpose(1, 2).reshape(side**2, window**2)
    apart = windows[:, None, :] != windows[:, :, None]
    return torch.where(apart, _OUTSIDE, 0.0)


class WindowBias(Add):
    """Swin's relative position bias and shift mask: B[w,h,i,j] = table[index[i,j], h] + outside[w,i,j].

    table: ((2·window−1)², H).  index: as `relative_position_index` returns.
    outside: as `shift_mask` returns; None if windows are not shifted, in which case B is (H, n, n).
    """

    index: Tensor
    outside: Tensor | None

    def __init__(self, table: Tensor, index: Int[Tensor, "n n"], outside: Float[Tensor, "windows n n"] | None) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.register_buffer("index", index)
        self.register_buffer("outside", outside)

    def matrix(self) -> Tensor:
        bias = self.table[self.index.flatten()].reshape(*self.index.shape, -1).permute(2, 0, 1)
        return bias if self.outside is None else bias + self.outside[:, None]

    def oddities(self) -> Iterator[Oddity]:
        window = math.isqrt(self.index.shape[0])
        if not self.index.equal(relative_position_index(window)):
            inside = bool(((self.index >= 0) & (self.index < self.table.shape[0])).all())
            yield Oddity(
                severity="warning" if inside else "error",
                what="the stored relative_position_index differs from the index for this window size"
                + ("; the stored index is used" if inside else " and points outside the bias table"),
            )
        if self.outside is not None and bool(((self.outside != 0) & (self.outside != _OUTSIDE)).any()):
            yield Oddity(severity="warning", what="the stored shift mask has values other than 0 and −100")

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        unshifted = self if self.outside is None else WindowBias(self.table.detach(), self.index, None)
        yield "the position bias without the shift mask", unshifted
        zeros = Constant(torch.zeros_like(self.matrix()), like=self)
        yield "no position bias and no shift mask", zeros


class PassedBias(Add):
    """The bias that an attention of a foreign network passes to PyTorch's fused attention function as ``attn_mask``.

    `layers.fused_call.AnsweredAttention` sets ``passed`` before each forward pass.
    network: the network that holds this step, which computes B from tables or small mlps.
    """

    passed: Tensor | None

    def __init__(self, network: nn.Module, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.passed = None
        self._keeps_passed = False
        self._network = (network,)  # in a tuple, so that the network does not become a submodule of its own part
        self._image_shape = image_shape
        self._known: tuple[object, Tensor] | None = None  # (the weights of the network as in `_weights_of`, B)

    def forward(self, scores: Tensor) -> Tensor:
        passed = self.passed
        if not self._keeps_passed:
            # A tensor with a gradient graph would keep the graph in memory, and could not be copied with the network.
            self.passed = None
        return scores if passed is None else scores + passed

    def matrix(self) -> Tensor:
        """Return B, of the shape (heads, N, N) or (windows, heads, N, N).

        The network runs on two batches of different size, once for all its biases until its weights change.
        Errors: FoldError when B depends on the images.
        """
        (network,) = self._network
        weights = _weights_of(network)
        if self._known is None or self._known[0] != weights:
            steps = {self, *(module for module in network.modules() if isinstance(module, PassedBias))}
            few, more = self._passed_for(2, steps), self._passed_for(3, steps)
            if self not in few:
                raise FoldError("the attention passed no bias to the fused attention function")
            for step in steps:
                step._known = None
            for step in few.keys() & more.keys():
                bias = few[step][:1]
                if all(batch.equal(bias.expand_as(batch)) for batch in (few[step], more[step])):
                    step._known = weights, bias[0].detach().clone()
        if self._known is None:
            raise FoldError(
                "the bias on the attention scores depends on the image, so it cannot be stored as a constant"
            )
        return self._known[1].clone()

    @torch.no_grad()
    def _passed_for(self, images: int, steps: set[PassedBias]) -> dict[PassedBias, Tensor]:
        """Return each bias that the network passes for random images, with the batch as the first dimension."""
        (network,) = self._network
        like = next(network.parameters())
        generator = torch.Generator().manual_seed(images)
        batch = torch.randn(images, *self._image_shape, generator=generator).to(like)
        for step in steps:
            step._keeps_passed = True
        try:
            network(batch)
        finally:
            for step in steps:
                step._keeps_passed = False
        passed = {step: step.passed for step in steps if step.passed is not None}
        for step in steps:
            step.passed = None
        return {step: bias if bias.dim() > 3 else bias[None] for step, bias in passed.items()}


def _weights_of(network: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return (address, number of changes) of each parameter and buffer, to recognise that a weight has changed."""
    return tuple((tensor.data_ptr(), tensor._version) for tensor in (*network.parameters(), *network.buffers()))


def manhattan_distances(grid: Grid) -> Float[Tensor, "n n"]:
    """Return |Δrow| + |Δcolumn| between tokens i and j of a grid, in float32, which is exact for integers."""
    points = lattice_points(grid)
    return (points[:, None, :] - points[None, :, :]).abs().sum(-1)


class ManhattanDecay(Add):
    """A bias that decreases with the distance of two tokens: B[h,i,j] = decay[h] · (|Δrow| + |Δcolumn|).

    decay: (H), negative: the logarithm of RMT's decay rate γ of each head. The decay is stored but not trained.
    grid: (1, n) for the decay along an axis with n tokens.
    Source: Manhattan self-attention of RMT.
    """

    decay: Tensor
    distances: Tensor

    def __init__(self, decay: Float[Tensor, " heads"], grid: Grid) -> None:
        super().__init__()
        self.grid = rows_and_columns(grid)
        self.register_buffer("decay", decay)
        # The distances follow from the grid. They are computed again at loading, and the state dict omits them.
        self.register_buffer("distances", manhattan_distances(grid), persistent=False)

    def matrix(self) -> Float[Tensor, "heads n n"]:
        return self.decay[:, None, None] * self.distances

    def numbers(self) -> StepNumbers:
        return StepNumbers(grid=self.grid)

    def oddities(self) -> Iterator[Oddity]:
        for head, decay in enumerate(self.decay.tolist()):
            if decay >= 0:
                what = f"expected a decay below 0, got {decay:.4g}: distant tokens do not get less weight"
                yield Oddity(severity="warning", where=f" head {head}", what=what)

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        yield "the decay missing", None
        yield "the decay of the heads in reverse order", Constant(self.matrix().flip(0), like=self)
        yield "the decay multiplied instead of added", _multiplied(self.matrix())
        # RetNet, for text, multiplies the scores by γ^distance, where RMT adds log γ · distance.
        yield "γ^distance multiplied instead of the decay added", _multiplied(self.matrix().exp())


def _multiplied(factors: Tensor) -> Constant:
    """Return a step that multiplies the scores, as a mistake."""
    mask = Multiply()
    mask.role = "mask"
    return Constant(factors, like=mask)


class PrefixBias(Add):
    """A bias between the N patches; the P prefix tokens get none: B = [[0, 0], [0, patches]], (H, P+N, P+N)."""

    def __init__(self, patches: Add, prefix: int) -> None:
        super().__init__()
        self.patches = patches
        self.prefix = prefix

    def matrix(self) -> Tensor:
        return self._padded(self.patches.matrix())

    def numbers(self) -> StepNumbers:
        return self.patches.numbers()

    def oddities(self) -> Iterator[Oddity]:
        yield from self.patches.oddities()

    def mistakes(self) -> Iterator[tuple[str, Step | None]]:
        for name, step in self.patches.mistakes():
            if step is None:
                yield name, None
            elif step.operation == "multiply":
                yield name, _multiplied(self._padded(step.matrix(), value=1.0))
            else:
                yield name, Constant(self._padded(step.matrix()), like=self)

    def _padded(self, matrix: Tensor, *, value: float = 0.0) -> Tensor:
        return nn.functional.pad(matrix, (self.prefix, 0, self.prefix, 0), value=value)


def retention_decays(heads: int) -> Float[Tensor, " heads"]:
    """Return log γ_h of RMT's decay rates, as training begins: γ_h = 1 − 2^(−2 − 4 · h / H), with h = 0 … H−1."""
    return torch.log(1 - 2 ** (-2 - 4 * torch.arange(heads, dtype=torch.float32) / heads))
