"""``problem_type`` of a folder and ``--task`` must agree; thresholds are always the user's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.exporting.options import ExportOptions
from tests.cli.terminal import gmmvit_here
from tests.hugging_face.folders import built, saved

pytestmark = pytest.mark.integration


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("stated", "task", "thresholds", "message", "hint"),
    [
        ("multi", None, None, "several labels; expected --task multi, got no --task", "add --task multi"),
        ("multi", "single", None, "expected --task multi, got --task single", "and --thresholds FILE"),
        ("single", "multi", "[]", "expected --task single, got --task multi", "leave --task and --thresholds out"),
    ],
)
def test_a_task_that_contradicts_the_folder_is_refused(
    stated: str, task: str | None, thresholds: str | None, message: str, hint: str, tmp_path: Path
) -> None:
    folder = saved("vit", tmp_path / "vit", built("vit", problem_type=f"{stated}_label_classification"))
    words: list[str | Path] = [] if task is None else ["--task", task]
    if thresholds is not None:
        (tmp_path / "t.json").write_text(thresholds)
        words += ["--thresholds", tmp_path / "t.json"]
    answer = gmmvit_here("export", folder, "-o", tmp_path / "b", *words, columns=500)
    assert answer.status == 1
    assert re.search(message, answer.err)
    assert hint in answer.err
    assert not (tmp_path / "b").exists()


def test_features_need_no_task(tmp_path: Path) -> None:
    folder = saved("vit", tmp_path / "vit", built("vit", problem_type="multi_label_classification"))
    known = load_checkpoint(folder).images
    assert (known.task, known.task_evidence) == (
        "multi-label",
        f"{folder}/config.json: problem_type is 'multi_label_classification'",
    )
    options = ExportOptions(outputs=("features",)).completed(known)
    assert (options.agreed_task, options.fitting_thresholds(())) == ("single-label", ())
