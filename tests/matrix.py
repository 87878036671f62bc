"""Choose the cases that ``make test`` runs of a check that repeats for many networks, precisions or mistakes.

Each test of `MATRIX` runs the same lines for all its cases. ``make test`` runs few cases, in which every family, every
kind of mask, every precision and every other value appears; the other cases get the marker ``matrix``.
``make test-all`` runs all cases.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

from tests.golden_files import MANIFEST

__all__ = ["MATRIX", "mark_matrix", "representatives"]

MATRIX: dict[str, tuple[str, ...]] = {
    "tests/bench/test_scripts.py::test_the_eager_baseline_gives_the_released_logits": (),
    "tests/checkpoints/test_weights.py::test_the_model_of_a_bundle_equals_the_trained_model": (),
    "tests/cli/test_presets.py::test_presets_of_224_pixels": ("family",),
    "tests/engines/test_build.py::test_every_attention_of_every_family_is_one_kernel": ("name",),
    "tests/export/test_bundle.py::test_eager_is_rebuilt_from_the_bundle_alone": (),
    "tests/export/test_bundle.py::test_golden_logits_through_onnxruntime": (),
    "tests/export/test_bundle.py::test_mask_hashes_are_those_of_the_trained_module_and_the_graph": (),
    "tests/export/test_timm_precisions.py::test_half_precision_stays_within_the_limits": (),
    "tests/export/test_timm_precisions.py::test_projections_are_quantised": (),
    "tests/families/test_contract.py::test_blocks_are_listed_in_the_order_in_which_the_graph_runs_them": (),
    "tests/families/test_contract.py::test_each_precision_exports": (),
    "tests/families/test_contract.py::test_every_node_declares_its_role": (),
    "tests/families/test_contract.py::test_exports_and_reopens": (),
    "tests/families/test_contract.py::test_kernel_takes_each_attention_or_gives_a_reason": (),
    "tests/families/test_contract.py::test_usual_mistakes_are_caught_by_name": (),
    "tests/families/test_counts.py::test_every_preset_runs_at_both_sizes": (),
    "tests/families/test_golden_runtimes.py::test_int8_in_openvino": (),
    "tests/families/test_golden_runtimes.py::test_onnxruntime": (),
    "tests/families/test_golden_runtimes.py::test_openvino": (),
    "tests/families/test_golden_runtimes.py::test_our_kernels": (),
    "tests/families/test_golden_runtimes.py::test_the_kernels_take_the_attentions_of_the_table": (),
    "tests/families/test_planted_mistakes.py::test_a_planted_mistake_is_caught_and_named": (),
    "tests/families/test_precisions.py::test_each_precision_exports": (),
    "tests/frozen/test_frozen.py::test_exported_graph_is_the_frozen_graph": (),
    "tests/frozen/test_frozen.py::test_mistakes_keep_their_names": (),
    "tests/frozen/test_frozen.py::test_quantised_engine_form_is_the_frozen_graph": (),
    "tests/graphs/test_proof.py::test_no_two_large_constants_are_equal": (),
    "tests/graphs/test_proof.py::test_operators_of_every_family": (),
    "tests/graphs/test_roles.py::test_attentions_have_the_names_of_their_modules": (),
    "tests/graphs/test_roles.py::test_every_node_of_every_family_has_a_role_in_the_policy": (),
    "tests/graphs/test_roles.py::test_what_families_declare_is_what_the_rules_see": (),
    "tests/kernels/test_masked_attention.py::test_the_fused_graph_gives_the_same_answers": ("name",),
    "tests/kernels/test_matcher.py::test_what_the_kernel_takes_of_every_family": (),
    "tests/kernels/test_onnxruntime_attention.py::test_the_fused_graph_gives_the_same_answers": ("name",),
    "tests/parity/test_check.py::test_right_runners_pass": (),
    "tests/pictures/test_every_system.py::test_the_attention_is_drawn_or_the_reason_is_stated": (),
    "tests/pictures/test_every_system.py::test_the_report_draws_every_step": (),
    "tests/pictures/test_masks.py::test_reports_of_every_golden_checkpoint": (),
    "tests/rollout/test_kills.py::test_a_kill_at_each_step_leaves_a_service_that_serves_what_its_state_names": (
        "victim",
    ),
    "tests/serving/test_golden_logits.py::test_golden_logits": (),
}
"""Test → the parameters by which cases are chosen; empty for all parameters."""


def kinds_of(value: Any) -> set[Hashable]:
    """Return what a case with this value of a parameter represents.

    Family and mask of a golden checkpoint or a small model, the family of a planted mistake; else the value itself.
    """
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if name in MANIFEST:
        return {("family", MANIFEST[name]["family"]), ("mask", MANIFEST[name]["mask"])}
    if hasattr(value, "variant"):
        return {("family", value.family.name), ("mask", value.variant or value.kind)}
    if hasattr(value, "family"):
        return {("family", value.family)}
    return {value if isinstance(value, Hashable) else repr(value)}


def representatives(cases: Sequence[dict[str, Any]], shared: Iterable[str] = ()) -> list[int]:
    """Return the indices of few cases that have every kind.

    Each time, this takes the case that adds the most kinds; of several, a case of a shared golden checkpoint, and of
    these the case whose kinds were taken least often, so that precisions take turns.

    cases: values of the parameters.  shared: names of golden checkpoints that other tests export, too.
    """
    kinds = [{(name, kind) for name, value in case.items() for kind in kinds_of(value)} for case in cases]
    absent: set[Hashable] = set().union(*kinds)
    taken, exported = Counter[Hashable](), frozenset(shared)
    chosen = []
    while absent:
        best = max(
            range(len(cases)),
            key=lambda n: (
                len(kinds[n] & absent),
                bool(exported.intersection(value for value in cases[n].values() if isinstance(value, str))),
                -sum(taken[kind] for kind in kinds[n]),
            ),
        )
        chosen.append(best)
        absent -= kinds[best]
        taken.update(kinds[best])
    return sorted(chosen)


def _skipped(item: pytest.Item) -> bool:
    return any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))


def mark_matrix(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that ``make test`` leaves out. A case that is skipped on this machine represents no other case."""
    golden = list(MANIFEST)
    shared = {golden[index] for index in representatives([{"name": name} for name in golden])}
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in MATRIX and not _skipped(item):
            cases[name].append(item)
    for name, group in cases.items():
        params = [item.callspec.params for item in group]  # type: ignore[attr-defined]
        kept = representatives([{key: case[key] for key in MATRIX[name] or case} for case in params], shared)
        for index in set(range(len(group))) - set(kept):
            group[index].add_marker(pytest.mark.matrix)
