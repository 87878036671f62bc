"""The PrometheusRule, checked by promtool: the alerts of the package, and the metric of the autoscaler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.serving.gateway.files import ALERTS
from tests.kubernetes.made import object_in, write
from tests.serving.test_alerts import promtool

pytestmark = pytest.mark.integration
_POD = 'job="gmmvit",instance="a:8002",namespace="n",pod="p"'
QUEUE_METRIC = "gmmvit_queue_seconds"
_UP = {f"up{{{_POD}}}": "1x20"}


def groups(bundle: Bundle, folder: Path) -> list[dict[str, Any]]:
    return object_in(write(bundle, folder / "out"), "PrometheusRule")["spec"]["groups"]


def test_the_rules_are_those_of_the_package_and_valid(bundle: Bundle, tmp_path: Path) -> None:
    rules = groups(bundle, tmp_path)
    assert rules[:-1] == yaml.safe_load(ALERTS.read_text())["groups"]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": rules}))
    promtool("check", "rules", file)


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (_UP, 0.0),  # a pod without requests
        (  # 60 ms in the gateway, 40 ms in Triton
            {
                **_UP,
                f'haproxy_backend_queue_time_average_seconds{{{_POD},proxy="triton_http"}}': "0.06x20",
                f'haproxy_backend_http_requests_total{{{_POD},proxy="triton_http"}}': "0+600x20",
                f'nv_inference_queue_duration_us{{{_POD},model="gmmvit_network"}}': "0+24000000x20",
                f'nv_inference_request_success{{{_POD},model="gmmvit_network"}}': "0+600x20",
            },
            0.1,
        ),
        (  # the mean of requests long ago
            {
                **_UP,
                f'haproxy_backend_queue_time_average_seconds{{{_POD},proxy="triton_http"}}': "0.06x20",
                f'haproxy_backend_http_requests_total{{{_POD},proxy="triton_http"}}': "600x20",
            },
            0.0,
        ),
    ],
    ids=["idle", "busy", "long ago"],
)
def test_the_metric_of_the_autoscaler(bundle: Bundle, tmp_path: Path, series: dict[str, str], expected: float) -> None:
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": groups(bundle, tmp_path)[-1:]}))
    samples = [{"labels": f'{QUEUE_METRIC}{{namespace="n", pod="p"}}', "value": expected}]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": QUEUE_METRIC, "eval_time": "15m", "exp_samples": samples}],
    }
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [case]}))
    assert "SUCCESS" in promtool("test", "rules", file)
