"""Networks that differ from the small model of their family, in fp16 and int8.

`test_contract.test_each_precision_exports` exports a small model of each family. Some families have networks with other
operators: the other releases of RMT, and DeepViT without convolutions before the patches or with an odd head dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.exporting.graphs_of_precisions import graph_from_model
from gmmvit_deploy.graphs.declared import declared_role
from gmmvit_deploy.inference.precision import CALIBRATED, QUANTIZED, ROLES, Precision
from gmmvit_deploy.models.families.deepvit import DEEPVIT
from gmmvit_deploy.models.families.family import Family, small_mask
from gmmvit_deploy.models.families.rmt import RMT
from gmmvit_deploy.models.layers.model import Model
from tests.conftest import golden
from tests.models.families.small_models import distinct_model, failing_rules, random_images, require_logits_of_precision

OTHER: dict[str, tuple[Family, dict[str, Any]]] = {
    "rmt-2023": (RMT, {"release": "2023", "projection_dim": 0}),
    "rmt-token_label": (RMT, {"release": "token_label"}),
    "deepvit-odd_head_dim": (DEEPVIT, {"dim": 99, "heads": 3}),
}
"""Name of a small model → its family, and the fields in which its spec differs from that of the contract."""
GOLDEN = ("deepvit_patch",)


def model_and_images(name: str) -> tuple[Model, np.ndarray]:
    if name in OTHER:
        family, fields = OTHER[name]
        small: Any = family.small(small_mask(family.mask_kinds[0]))
        spec = replace(small, **fields)
        return distinct_model(spec), random_images(spec)
    case = golden(name)
    return load_checkpoint(case.path, case.hints).model, case.inputs


@pytest.mark.first(1)
@pytest.mark.integration
@pytest.mark.parametrize(("name", "precision"), [*((name, "fp16") for name in (*OTHER, *GOLDEN)), ("rmt-2023", "int8")])
def test_each_precision_exports(name: str, precision: Precision) -> None:
    """bf16 has the nodes of fp16, and fp8 those of int8."""
    model, images = model_and_images(name)
    calibration = [images] if precision in CALIBRATED else None
    with failing_rules():
        prepared = graph_from_model(model, precision, preprocessing=None, max_batch=8, calibration=calibration)
    assert {declared_role(node) for node in prepared.model.graph} <= set(ROLES)
    share = require_logits_of_precision(prepared.model, precision, model, images)
    assert share < (0.25 if precision in QUANTIZED else 0.05)
