"""A trained vision transformer with a mask on its attention, taken to production.

    checkpoint ──load──> model ──fold──> folded model ──export──> bundle ──write──> Triton repository ──serve──> logits

Folding computes every mask once and stores the mask as a constant. Each attention then has the form
softmax(S ∘ M + B) V with S = Q Kᵀ, where the mask M and the bias B are constants and ∘ multiplies elementwise. The
modules of this package are its public interface. Importing the package imports no heavy dependency.
"""

__version__ = "0.1.0"
