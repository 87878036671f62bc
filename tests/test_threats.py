"""Every threat and every published fault of docs/pages/protection.md names a test or a script that exists, or the page
says that nothing shows what happens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.documented import PAGES, ROOT, table

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
    "a [page in a browser](#pages-in-a-browser-of-this-machine) of the machine": (
        "tests/serving/test_pages_of_browsers.py::test_a_page_changes_nothing_and_reads_nothing",
        "tests/serving/test_pages_of_browsers.py::test_a_page_with_dns_rebinding_reads_answers_and_changes_nothing",
        "tests/serving/test_pages_of_browsers.py::test_a_page_reaches_nothing_behind_a_gateway",
    ),
}
"""Row of the page → tests, each as FILE::FUNCTION, and scripts."""
FAULTS = {
    "chunked bodies take the stack": (
        "tests/serving/test_published_faults.py::test_no_chunked_body_passes_the_gateway",
        "tests/serving/test_hostile_requests.py::test_the_same_server_answers_after_deep_nesting",
    ),
    "recursion": (
        "tests/serving/test_gateway.py::test_no_number_of_json_wraps",
        "tests/serving/test_hostile_requests.py::test_the_same_server_answers_after_deep_nesting",
    ),
    "compressed requests": (
        "tests/serving/test_gateway.py::test_the_277_bytes_that_end_a_server",
        "tests/serving/test_gateway.py::test_compressed_messages",
    ),
    "very large requests": ("tests/serving/test_gateway.py::test_too_large",),
    "an error names the memory of the Python backend": (
        "tests/serving/test_small_shared_memory.py::test_no_answer_of_the_gateway_names_the_memory_of_the_server",
    ),
    "that memory, registered as a client's": (
        "tests/serving/test_published_faults.py::test_nobody_registers_memory_of_the_server_through_the_gateway",
        "tests/serving/test_published_faults.py::test_nobody_registers_memory_of_a_server_without_a_gateway",
    ),
    "models and configurations that a client loads": (
        "tests/serving/test_gateway.py::test_everything_else_is_404",
        "tests/serving/test_gateway.py::test_methods_of_nobody",
        "tests/serving/test_published_faults.py::test_nobody_registers_memory_of_a_server_without_a_gateway",
    ),
    "a stream that is cancelled": ("tests/serving/test_published_faults.py::test_no_stream_passes_the_gateway",),
    "very many outputs": ("tests/serving/test_published_faults.py::test_a_request_for_very_many_outputs_is_an_error",),
    "parts for DALI, TensorRT, MLflow and SageMaker": (
        "tests/serving/test_published_faults.py::test_the_server_has_the_python_backend_and_three_ports",
    ),
    "authentication that is missing or bypassed": (
        "tests/serving/test_gateway.py::test_no_key",
        "tests/serving/test_gateway.py::test_everything_else_is_404",
    ),
    "requests that no source names": (),
}
"""Row of the page, without its CVEs → tests."""


def test_every_threat_has_a_test_that_exists() -> None:
    assert [row[0] for row in table("protection.md", "threat")] == list(SHOWN_BY)
    _require_tests(SHOWN_BY)


def test_every_published_fault_has_a_test_that_exists_or_is_said_not_to() -> None:
    rows = {name: (cves.split(", "), more) for (first, *more) in table("protection.md", "published fault")
            for name, _, cves in [first.partition(": ")]}  # fmt: skip
    assert list(rows) == list(FAULTS)
    listed = [cve for cves, _ in rows.values() for cve in cves]
    assert all(re.fullmatch(r"CVE-\d{4}-\d{4,5}", cve) for cve in listed)
    assert len(set(listed)) == len(listed)
    assert f"published {len(listed)} faults" in (PAGES / "protection.md").read_text(encoding="utf-8")
    for name, tests in FAULTS.items():
        assert bool(tests) != rows[name][1][1].startswith("not shown")
    _require_tests(FAULTS)


def _require_tests(shown_by: Mapping[str, tuple[str, ...]]) -> None:
    for shown in shown_by.values():
        for place in shown:
            file, _, test = place.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert file.startswith("benchmarks/") or re.search(rf"def {test}\(", text), place
