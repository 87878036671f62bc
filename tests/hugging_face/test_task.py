"""``problem_type`` of a folder and ``--task`` must agree; thresholds are always the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.exporting.options import ExportOptions
from tests.hugging_face.folders import built, saved

pytestmark = pytest.mark.integration


def test_features_need_no_task(tmp_path: Path) -> None:
    folder = saved("vit", tmp_path / "vit", built("vit", problem_type="multi_label_classification"))
    known = load_checkpoint(folder).images
    assert (known.task, known.task_evidence) == (
        "multi-label",
        f"{folder}/config.json: problem_type is 'multi_label_classification'",
    )
    options = ExportOptions(outputs=("features",)).completed(known)
    assert (options.agreed_task, options.fitting_thresholds(())) == ("single-label", ())
