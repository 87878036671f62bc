"""The alert rules: each fires on a fault and stays silent beside the fault, checked by promtool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gmmvit_deploy.serving.gateway.files import ALERTS
from tests.certificates import self_signed
from tests.documented import PAGES, blocks

NAMES = re.findall(r"- alert: (\w+)", ALERTS.read_text(encoding="utf-8"))
_JOB = 'job="gmmvit",instance="a:8002"'
_HTTP = f'haproxy_frontend_http_requests_total{{{_JOB},proxy="http"}}'
_GRPC = f'haproxy_frontend_http_requests_total{{{_JOB},proxy="grpc"}}'
_HTTP_5XX = f'haproxy_frontend_http_responses_total{{{_JOB},proxy="http",code="5xx"}}'
_HTTP_4XX = f'haproxy_frontend_http_responses_total{{{_JOB},proxy="http",code="4xx"}}'
_HEALTH, _GRPC_REFUSED = (
    f'haproxy_frontend_intercepted_requests_total{{{_JOB},proxy="{proxy}"}}' for proxy in ("http", "grpc")
)
_TRITON_5XX = f'haproxy_server_http_responses_total{{{_JOB},proxy="triton_http",server="triton",code="5xx"}}'
_GRPC_LATE = f'haproxy_backend_connection_errors_total{{{_JOB},proxy="triton_grpc"}}'
_TRIED = f'nv_inference_request_success{{{_JOB},model="gmmvit_network",version="1"}}'
_FREE, _SIZE = (f'gmmvit_filesystem_{name}_bytes{{{_JOB},folder="/dev/shm"}}' for name in ("free", "size"))
_AT_S = 20 * 60  # promtool's clock at the verdict, 20 minutes after 1970
_DAY_S = 86400


def _failure(model: str, reason: str) -> str:
    return f'nv_inference_request_failure{{{_JOB},model="{model}",reason="{reason}",version="1"}}'


def _counter(name: str, labels: str = "") -> str:
    return f"gmmvit_{name}{{{_JOB}{labels}}}"


def _queue(proxy: str, requests: str, wait_s: str) -> dict[str, str]:
    labels = f'{{{_JOB},proxy="{proxy}"}}'
    return {
        f"haproxy_backend_queue_time_average_seconds{labels}": wait_s,
        f"haproxy_backend_http_requests_total{labels}": requests,
    }


def _restarts(name: str, labels: str = "") -> list[tuple[dict[str, str], bool]]:
    return [
        ({_counter(name, labels): "0x15 1x10"}, True),
        ({_counter(name, labels): "3x30"}, False),
        ({_counter(name, labels): "0x5 1x20"}, False),  # more than ten minutes ago
    ]


def _slow(model: str, quantile: str, micros: int) -> dict[str, str]:
    name = f'nv_inference_request_summary_us{{{_JOB},model="{model}",version="1",quantile="{quantile}"}}'
    return {name: f"{micros}x30"}


def _expiry(days: float) -> dict[str, str]:
    return {_counter("gateway_certificate_expiry_seconds"): f"{_AT_S + days * _DAY_S:.0f}x30"}


def _answers(*, sure: int, unsure: int, expected: tuple[float, ...]) -> dict[str, str]:
    """Answers a minute in two buckets, in as many classes, and the shares that are expected of the buckets."""
    model, buckets = f'{_JOB},model="shop"', ("0.99-1", "0.6-0.8")
    series = {}
    for kind, names in (("probability", buckets), ("class", ("cat", "dog"))):
        for bucket, count in zip(names, (sure, unsure), strict=True):
            series[f'gmmvit_answers_total{{{model},kind="{kind}",bucket="{bucket}"}}'] = f"0+{count}x200"
    for bucket, share in zip(buckets, expected, strict=False):
        series[f'gmmvit_expected_answers_ratio{{{model},kind="probability",bucket="{bucket}"}}'] = f"{share}x200"
    return series


# Alert → (metrics as promtool writes them, a sample each minute; whether the alert fires after 20 minutes).
CASES: dict[str, list[tuple[dict[str, str], bool]]] = {
    "GmmvitUnreachable": [
        ({f"up{{{_JOB}}}": "1x10 0x20"}, True),
        ({f"up{{{_JOB}}}": "1x19 0x9"}, False),  # a single reading
        ({'up{job="another",instance="a:8002"}': "0x30"}, False),
    ],
    "GmmvitServerDown": [
        ({_counter("server_up"): "1x10 0x20"}, True),
        ({_counter("server_up"): "1x19 0x9"}, False),  # a restart takes seconds
    ],
    "GmmvitNotReady": [
        ({f'haproxy_backend_active_servers{{{_JOB},proxy="triton_http"}}': "1x15 0x10"}, True),
        ({f'haproxy_backend_active_servers{{{_JOB},proxy="triton_http"}}': "1x30"}, False),
        ({f'haproxy_backend_active_servers{{{_JOB},proxy="no_metrics"}}': "0x30"}, False),
    ],
    "GmmvitMetricsMissing": [
        ({_counter("metrics_source_up", ',source="gateway"'): "1x10 0x20"}, True),
        ({_counter("metrics_source_up", ',source="gateway"'): "1x18 0x9"}, False),
    ],
    "GmmvitRestartFails": _restarts("server_failed_restarts_total"),
    "GmmvitServerRestarted": _restarts("server_restarts_total", ',reason="worker"'),
    "GmmvitGatewayRestarted": _restarts("gateway_restarts_total"),
    "GmmvitFrontRestarted": _restarts("front_restarts_total"),
    "GmmvitProbesFail": [
        ({_counter("probes_total", ',model="gmmvit_network",result="late"'): "0+1x30"}, True),
        ({_counter("probes_total", ',model="gmmvit_network",result="answered"'): "0+60x30"}, False),
        ({_counter("probes_total", ',model="gmmvit_network",result="late"'): "0x15 2x15"}, False),
    ],
    "GmmvitServerErrors": [
        ({_TRIED: "0+600x30", _failure("gmmvit_network", "BACKEND"): "0+60x30"}, True),
        ({_TRIED: "0x30", _failure("gmmvit_network", "OTHER"): "0+60x30"}, True),  # nothing succeeds
        ({_TRIED: "0+6000x30", _failure("gmmvit_network", "BACKEND"): "0+6x30"}, False),  # 0.1%
        ({_TRIED: "0+600x30", _failure("gmmvit_network", "CANCELED"): "0+60x30"}, False),  # clients that left
        ({_TRIED: "0+600x30", _failure("gmmvit", "OTHER"): "0+60x30"}, False),  # images that cannot be decoded
    ],
    "GmmvitOverloaded": [
        ({_HTTP: "0+600x30", _HTTP_5XX: "0+60x30", _TRITON_5XX: "0x30", _GRPC_LATE: "0x30"}, True),
        ({_GRPC: "0+600x30", _HTTP_5XX: "0x30", _TRITON_5XX: "0x30", _GRPC_LATE: "0+60x30"}, True),
        ({_HTTP: "0+600x30", _HTTP_5XX: "0+3x30", _TRITON_5XX: "0x30", _GRPC_LATE: "0x30"}, False),  # 0.5%
        ({_HTTP: "0+600x30", _HTTP_5XX: "0+60x30", _TRITON_5XX: "0+60x30", _GRPC_LATE: "0x30"}, False),  # malformed
    ],
    "GmmvitQueueSlow": [
        (_queue("triton_grpc", "0+600x30", "0.2x30"), True),
        (_queue("triton_grpc", "0+600x30", "0.05x30"), False),
        (_queue("triton_grpc", "600x30", "0.2x30"), False),  # an average of long ago
    ],
    "GmmvitSlow": [
        (_slow("gmmvit_network", "0.99", 2_000_000), True),
        (_slow("gmmvit_network", "0.99", 200_000), False),
        (_slow("gmmvit_preprocess", "0.99", 2_000_000), False),  # large images
    ],
    "GmmvitManyRefused": [
        ({_HTTP: "0+600x30", _HTTP_4XX: "0+400x30", _GRPC_REFUSED: "0x30"}, True),
        ({_GRPC: "0+600x30", _HTTP_4XX: "0x30", _GRPC_REFUSED: "0+400x30"}, True),
        ({_HTTP: "0+600x30", _HTTP_4XX: "0+60x30", _GRPC_REFUSED: "0x30"}, False),
        ({_HTTP: "0+600x30", _HTTP_4XX: "0x30", _GRPC_REFUSED: "0x30", _HEALTH: "0+600x30"}, False),
    ],
    "GmmvitAnswersDiffer": [
        (_answers(sure=15, unsure=15, expected=(0.9, 0.1)), True),
        (_answers(sure=27, unsure=3, expected=(0.9, 0.1)), False),
        (_answers(sure=25, unsure=5, expected=(0.9, 0.1)), False),  # by chance
        (_answers(sure=2, unsure=1, expected=(0.9, 0.1)), False),  # too few answers
        (_answers(sure=15, unsure=15, expected=()), False),  # optimize recorded nothing
    ],
    "GmmvitReloadFailed": [
        ({_counter("gateway_reload_failed"): "0x10 1x20"}, True),
        ({_counter("gateway_reload_failed"): "1x10 0x20"}, False),
    ],
    "GmmvitCertificateExpires": [(_expiry(13), True), (_expiry(15), False)],
    "GmmvitCertificateExpiresSoon": [(_expiry(0.5), True), (_expiry(-1), True), (_expiry(2), False)],
    "GmmvitFilesystemFull": [
        ({_FREE: "5x30", _SIZE: "100x30"}, True),
        ({_FREE: "20x30", _SIZE: "100x30"}, False),
    ],
    "GmmvitRolloutFailed": [
        ({_counter("rollouts_total", ',result="failed"'): "0x15 1x10"}, True),
        ({_counter("rollouts_total", ',result="promoted"'): "0x15 1x10"}, False),
    ],
    "GmmvitRolloutRuns": [
        ({_counter("rollout_running"): "1x80"}, True),
        ({_counter("rollout_running"): "1x40 0x40"}, False),
    ],
}
_AT = {"GmmvitRolloutRuns": "75m", "GmmvitAnswersDiffer": "150m"}


def promtool(*arguments: str | Path) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on PATH; on Debian, type apt-get install prometheus")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.integration
def test_the_documented_configuration_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGES / "operate.md"
    (block,) = (block for block in blocks(page, page.read_text(encoding="utf-8")) if block.language == "yaml")
    monkeypatch.chdir(tmp_path)
    Path("prometheus.yml").write_text(block.text.replace("HOST", "127.0.0.1"))
    Path("prometheus.key").write_text("key")
    self_signed(tmp_path, "ca").certificate.rename("ca.pem")
    shutil.copy(ALERTS, tmp_path)
    assert f"{len(NAMES)} rules found" in promtool("check", "config", "prometheus.yml")


@pytest.mark.nightly
@pytest.mark.integration
def test_each_alert_fires_and_stays_silent(tmp_path: Path) -> None:
    tests = [
        {
            "name": f"{alert}: {series}",
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                    "eval_time": _AT.get(alert, f"{_AT_S}s"),
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
            ],
        }
        for alert, cases in CASES.items()
        for series, fires in cases
    ]
    (tmp_path / "tests.yml").write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": tests}))  # JSON is YAML
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yml")


def test_each_alert_has_both_cases_and_what_to_do() -> None:
    assert list(CASES) == NAMES
    for alert, cases in CASES.items():
        assert {fires for _, fires in cases} == {True, False}, alert
    text = ALERTS.read_text(encoding="utf-8")
    for word in ("labels: {severity: page}|labels: {severity: ticket}", "summary: ", "action: "):
        assert len(re.findall(word, text)) == len(NAMES), word


def test_the_runbook_has_each_alert() -> None:
    page = (PAGES / "operate.md").read_text(encoding="utf-8")
    assert re.findall(r"^#### (Gmmvit\w+)$", page, re.MULTILINE) == NAMES
