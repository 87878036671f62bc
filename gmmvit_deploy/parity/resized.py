"""The accuracy check of a model that export resized to another image size than in training.

Every check compares a runner (a runtime, an engine or a server) with PyTorch, and PyTorch runs the resized model too.
So the checks can pass although the resized model predicts wrong classes: only labelled images show its accuracy.
Without labelled images, the accuracy check is therefore undecided, not skipped.
"""

from __future__ import annotations

from dataclasses import replace

from gmmvit_deploy.models.specs import ModelSpec
from gmmvit_deploy.parity.verdict import Check

__all__ = ["accuracy_of_resized"]


def accuracy_of_resized(accuracy: Check, spec: ModelSpec) -> Check:
    """Return the accuracy check for the spec of a bundle; unchanged if the model was not resized.

    If the model was resized and the check was skipped, the result is undecided. If the check ran, the verdict stays,
    and the summary states what PyTorch's top-1 must be compared with.
    """
    if not spec.resizing:
        return accuracy
    if accuracy.verdict != "skipped":
        note = f"the model was {spec.resizing}: compare PyTorch's top-1 with the top-1 before the resizing"
        return replace(accuracy, summary=f"{accuracy.summary}; {note}")
    why = f"the model was {spec.resizing}, and its accuracy at this size was not checked: {accuracy.summary}"
    return replace(accuracy, verdict="undecided", summary=why, reasons=(why,))
