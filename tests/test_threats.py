"""Every threat of docs/pages/protection.md has a test, or a script in benchmarks/, that shows what happens."""

from __future__ import annotations

import re

from tests.documented import ROOT, table

SHOWN_BY = {
    "a stranger without a key": ("tests/serving/test_gateway.py::test_no_key",),
    "a stolen key": ("tests/serving/test_gateway.py::test_keys_change_without_a_restart",),
    "somebody reads the traffic": ("tests/serving/test_gateway_config.py::test_other_machines_only_with_tls",),
    "277 bytes of compressed JSON that end an unprotected Triton": (
        "tests/serving/test_gateway.py::test_the_277_bytes_that_end_a_server",
        "tests/serving/test_hostile_requests.py::test_the_same_server_answers_after_deep_nesting",
    ),
    "malicious requests with a key": (
        "tests/serving/test_supervisor.py::test_a_killed_process_under_load_is_back_within_ten_seconds",
    ),
    "hostile images, bundles, checkpoints": (
        "tests/hostile/test_hostile.py::test_commands_refuse_code_in_checkpoints_and_loops_in_bundles",
        "benchmarks/hostile.py",
    ),
    "changes of Triton's logs, shared memory, models": (
        "tests/serving/test_gateway.py::test_everything_else_is_404",
        "tests/serving/test_gateway.py::test_administration_needs_the_secret",
    ),
    "too large requests": ("tests/serving/test_gateway.py::test_too_large",),
    "300 in JSON for uint8, which Triton reads as 44": ("tests/serving/test_gateway.py::test_no_number_of_json_wraps",),
    "small files with very many pixels": (
        "tests/serving/test_large_images.py::test_too_many_pixels_are_refused_with_the_budget",
    ),
    "bodies that never arrive": ("tests/serving/test_gateway.py::test_unfinished_bodies_leave_the_service_to_others",),
    "overload": (
        "tests/serving/test_gateway.py::test_the_limit_of_the_queue_counts_both_protocols",
        "benchmarks/overload.py",
    ),
    "server or worker dies, or the machine was paused": (
        "tests/serving/test_supervisor.py::test_a_killed_process_under_load_is_back_within_ten_seconds",
    ),
    "a worker hangs": (
        "tests/serving/test_supervisor.py::test_a_worker_that_hangs_while_another_model_is_busy_is_noticed_within_thirty_seconds",
    ),
    "HAProxy or HTTP endpoint dies": ("tests/serving/test_gateway.py::test_a_killed_haproxy_is_started_again",),
    "`gmmvit serve` is killed": ("tests/serving/test_server.py::test_killing_gmmvit_ends_triton",),
    "a new bundle is wrong": (
        "tests/serving/rollout/test_rollout.py::test_other_answers_than_the_golden_answers_go_back_under_load",
        "tests/serving/rollout/test_rollout.py::test_other_labels_of_the_images_go_back",
    ),
    "a kill during a rollout": (
        "tests/serving/rollout/test_kills.py::test_a_kill_leaves_a_service_that_serves_what_its_state_names",
    ),
    "another user of the machine": (
        "tests/serving/test_gateway.py::test_inferences_and_configurations_need_no_secret",
    ),
}
"""Row of the page → tests, each as FILE::FUNCTION, and scripts."""


def test_every_threat_has_a_test_that_exists() -> None:
    assert [row[0] for row in table("protection.md", "threat")] == list(SHOWN_BY)
    for shown in SHOWN_BY.values():
        for place in shown:
            file, _, test = place.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert file.startswith("benchmarks/") or re.search(rf"def {test}\(", text), place
