"""A trained vision transformer with a mask on its attention, taken to production.

    checkpoint ──load──> model ──fold──> folded model ──export──> bundle ──> Triton repository ──> answers

Every attention has the same folded form, P = softmax(S ∘ M + B) V with S = Q Kᵀ and constants M and B. The modules of
this package are its public interface. Importing the package imports no heavy dependency.
"""

__version__ = "0.1.0"
