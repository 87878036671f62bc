"""A trained vision transformer with a mask on its attention, taken to production.

    checkpoint ──load──> model ──fold──> folded model ──export──> bundle ──> Triton repository ──> answers

Every attention has one canonical folded form, P = softmax(S ∘ M + B) V with S = Q Kᵀ, in which M
and B are constants. The modules of this package are its public interface; nothing heavy is
imported here.
"""

__version__ = "0.1.0"
