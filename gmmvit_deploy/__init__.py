"""Take a trained vision transformer with masked attention to production.

    checkpoint ──load──> model ──fold──> folded model ──export──> bundle ──write──> Triton repository ──serve──> logits

Folding computes every mask once and stores the mask in the model as a constant. Each attention then has the form
softmax(S ∘ M + B) V with the scores S = Q Kᵀ. The mask M and the bias B are constants, and ∘ multiplies elementwise.
A bundle is the folder that the export writes. The modules of this package are the public interface of the package.
Importing the package imports no heavy dependency.
"""

__version__ = "0.1.0"
