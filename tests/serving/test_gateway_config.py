"""The gateway's configuration, key file and settings, without a server; HAProxy checks what it would run."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy import doctor
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError, OutputError, RepositoryError, ServerError
from gmmvit_deploy.inference.runner_name import RunnerName
from gmmvit_deploy.runtimes.programs._triton_errors import Request, error_from_transport
from gmmvit_deploy.runtimes.programs.access import Access
from gmmvit_deploy.serving.gateway._keys import Client, map_of_keys, map_text, read_keys, readable_by_others
from gmmvit_deploy.serving.gateway.files import ALERTS, gateway_folder, gateway_options, tls_pem, write_files
from gmmvit_deploy.serving.gateway.gateway import AccessLog
from gmmvit_deploy.serving.gateway.haproxy import check_config, find_haproxy, haproxy_version
from gmmvit_deploy.serving.gateway.options import Front, GatewayOptions, GatewaySettings, HealthCheck, Upstream
from gmmvit_deploy.serving.model_configs import config_text as pbtxt
from gmmvit_deploy.serving.model_configs import model_configs
from gmmvit_deploy.serving.names import TUNING_FILE
from gmmvit_deploy.serving.options import RepositoryOptions
from gmmvit_deploy.serving.served_models import read_models
from gmmvit_deploy.serving.server import ServerOptions
from gmmvit_deploy.serving.server_log import ServerLog
from tests.certificates import self_signed
from tests.cli.terminal import gmmvit_here, without_progress
from tests.haproxy import needs_haproxy
from tests.serving.gateways import KEY, OTHER_KEY, key_file, request
from tests.waiting import wait_until

HASH = hashlib.sha256(KEY.encode()).hexdigest().upper()
MANY = tuple(f"model-{number}" for number in range(40))
PORTS = (8443, 8444, 8445)
BINDS = dict(zip(("HTTP", "gRPC", "metrics"), (f"127.0.0.1:{port}" for port in PORTS), strict=True))


def options(**changes: Any) -> GatewayOptions:
    upstream = Upstream(
        name="triton", http="127.0.0.1:8000", grpc="127.0.0.1:8001", metrics="127.0.0.1:8002", bundle="ab12"
    )
    settings = GatewaySettings(
        **{"keys": Path("keys"), "in_flight": 16, "queue_timeout_ms": 250, **changes.pop("own", {})}
    )
    values: dict[str, Any] = {
        "settings": settings,
        "binds": BINDS,
        "upstreams": (upstream,),
        "models": ("gmmvit", "gmmvit_network"),
        "health": (HealthCheck(path="/v2/models/gmmvit_network/infer", body="A" * 12),),
    }
    return GatewayOptions(**{**values, **changes})


def network(folder: Path, dims: str = "[ 3 ]", data_type: str = "TYPE_UINT8") -> Path:
    """Write a repository with the configuration of a network."""
    (folder / "net").mkdir()
    config = f'name: "net" input {{ name: "x" data_type: {data_type} dims: {dims} }}'
    (folder / "net" / "config.pbtxt").write_text(config)
    return folder


class TestKeys:
    def test_lines_become_hashes(self, tmp_path: Path) -> None:
        path = key_file(tmp_path, f"web {KEY}  # the web site", "", f"web {OTHER_KEY}", f"batch sha256:{'0a' * 32}")
        keys = read_keys(path)
        other = hashlib.sha256(OTHER_KEY.encode()).hexdigest().upper()
        assert keys == {HASH: Client("web"), other: Client("web"), "0A" * 32: Client("batch")}
        text = map_text(map_of_keys(keys))
        assert text.splitlines()[0] == f"{HASH} web"
        assert KEY not in text

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("web", r"keys\.txt:2: expected NAME KEY, got a line of 1 word\n"),
            (f"web {KEY} more", "a line of 3 words"),
            (f"web {KEY} models=cats,a.b", "expected only letters, digits, - and _, got 'a.b'"),
            (f"web {KEY} models=", "expected only letters, digits, - and _, got ''"),
            (f"the/web {KEY}", "expected a name of 1 to 64"),
            ("web short", "expected a key of 16 to 512 .*, got 5 characters"),
            (f"web {KEY}!", "expected a key"),
            ("web sha256:12", "expected a key"),
            (f"a {KEY}\nb {KEY}", r":3: b has the same key as a"),
            ("# nobody", "got no key"),
        ],
    )
    def test_invalid_lines_are_named_without_the_key(self, line: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=message) as caught:
            read_keys(key_file(tmp_path, line))
        assert KEY not in str(caught.value)

    def test_a_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"missing\.txt: the key file cannot be read: No such file"):
            read_keys(tmp_path / "missing.txt")
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        with pytest.raises(InputError, match="not UTF-8 text"):
            read_keys(tmp_path / "binary")

    def test_keys_that_others_can_read_are_noticed(self, tmp_path: Path) -> None:
        keys = key_file(tmp_path)
        for mode, others in ((0o644, True), (0o600, False)):
            keys.chmod(mode)
            assert readable_by_others(keys) == others


class TestSettings:
    def test_other_machines_only_with_tls(self, tmp_path: Path) -> None:
        keys = key_file(tmp_path)
        with pytest.raises(InputError, match=r"--listen 0\.0\.0\.0 without TLS") as caught:
            GatewaySettings(keys=keys, listen="0.0.0.0")  # noqa: S104 - refused
        assert "--tls-cert" in caught.value.hint
        GatewaySettings(keys=keys, listen="0.0.0.0", insecure=True)  # noqa: S104 - nothing listens
        GatewaySettings(keys=keys, listen="0.0.0.0", tls_cert=keys)  # noqa: S104 - nothing listens

    @pytest.mark.parametrize(
        ("wrong", "bound"),
        [
            *(
                ({name: minimum - 1}, f"{name}: expected at least {minimum}")
                for name, minimum in {
                    "max_body_bytes": 1024,
                    "json_bytes": 0,
                    "in_flight": 1,
                    "queue_limit": 0,
                    "queue_timeout_ms": 1,
                }.items()
            ),
            # HAProxy compares lengths in 32 bits; 16.7 million brackets of JSON end a server with a stack of 1 GiB.
            ({"max_body_bytes": 10**9}, "max_body_bytes: expected at most"),
            ({"json_bytes": 2**22 + 1}, "json_bytes: expected at most"),
        ],
        ids=str,
    )
    def test_numbers_have_bounds(self, wrong: dict[str, int], bound: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=bound):
            GatewaySettings(keys=tmp_path, **wrong)

    def test_tuning_bounds_the_queue(self, tmp_path: Path) -> None:
        settings = GatewaySettings(keys=key_file(tmp_path))
        models = read_models(network(tmp_path))

        def chosen(own: GatewaySettings) -> tuple[int | None, int | None]:
            made = gateway_options(own, models, tmp_path, binds=BINDS, upstreams=()).settings
            return made.in_flight, made.queue_timeout_ms

        assert chosen(settings) == (16, 250)
        (tmp_path / TUNING_FILE).write_text(json.dumps({"rate": 500.0, "bound_ms": 20.0}))
        assert chosen(settings) == (10, 20)
        assert chosen(replace(settings, in_flight=3, queue_timeout_ms=7)) == (3, 7)
        for other in ("[]", "{}", "no JSON", '{"rate": [], "bound_ms": 1}'):
            (tmp_path / TUNING_FILE).write_text(other)
            expected = f"{TUNING_FILE}: expected the measurement of gmmvit tune, .* got other content"
            with pytest.raises(InputError, match=expected):
                chosen(settings)


class TestHAProxy:
    def test_without_haproxy_the_commands_name_how_to_install_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gmmvit_deploy.serving.gateway.haproxy.shutil.which", lambda *_, **__: None)
        answer = gmmvit_here("serve", network(tmp_path), "--gateway", "--keys", key_file(tmp_path))
        assert answer.status == 1
        error, hint = without_progress(answer.err).splitlines()
        assert error == "Error: the gateway needs HAProxy 2.6 or newer, and there is no haproxy on PATH"
        assert hint == "hint: apt-get install haproxy"
        (check,) = [part for name, part in doctor._parts() if name == "haproxy"]
        assert (check().works, check().fix) == (False, "apt-get install haproxy")
        assert "there is no haproxy on PATH" in check().detail

    @pytest.mark.integration
    @pytest.mark.parametrize(
        ("version", "message"), [("2.2.9", r"2\.6 or newer, got 2\.2\.9"), ("x", "is not HAProxy: ")]
    )
    def test_another_program_on_path(
        self, version: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "haproxy").write_text(f"#!/bin/sh\necho HAProxy version {version}\n")
        (tmp_path / "haproxy").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        with pytest.raises(ServerError, match=message):
            find_haproxy()


class TestConfig:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"own": {"json_bytes": 4096}},
            {"own": {"queue_limit": 0}},
            {"threads": 1},
            {"front": Front(port=9000, secret="0123")},  # noqa: S106 - of a test
            {"admin": ("x-admin", "0123"), "metrics_address": "127.0.0.1:9001"},
            {"health": (HealthCheck(path="/v2/health/ready", why_not="large"),)},
            {"access_log": "127.0.0.1:514"},
            {"sockets": "/tmp/with space"},
            {
                "front": Front(port=9000, secret="0123", models=MANY),  # noqa: S106
                "models": tuple(model for name in MANY for model in RepositoryOptions(name=name).models),
                "health": tuple(HealthCheck(path=f"/v2/models/{name}/ready") for name in MANY),
            },
        ],
        ids=["default", "json", "no queue", "threads", "front", "admin", "no inference", "syslog", "sockets", "many"],
    )
    @pytest.mark.integration
    @needs_haproxy
    def test_haproxy_takes_it(self, changes: dict[str, Any], tmp_path: Path) -> None:
        check_config(find_haproxy(), write_files(tmp_path, options(**changes), {HASH: Client("web")}, ""))


class TestModels:
    def test_of_a_network_alone_the_check_sends_a_tensor(self, tmp_path: Path) -> None:
        models = read_models(network(tmp_path, "[ 4, 4, 3 ]", "TYPE_FP32"))
        (check,) = models.health
        assert check.body == "A" * 192
        assert dict(check.headers)["inference-header-content-length"] == "0"
        assert models.bundle == ""

    @pytest.mark.parametrize("dims", ["[ 224, 224, 3 ]", "[ -1, 3 ]"])
    def test_what_cannot_be_checked_by_inference_is_stated(self, dims: str, tmp_path: Path) -> None:
        (check,) = read_models(network(tmp_path, dims)).health
        assert check.why_not == "net takes neither an encoded image nor a tensor of at most 65536 bytes"
        assert check.path == "/v2/models/net/ready"

    def test_no_repository(self, tmp_path: Path) -> None:
        with pytest.raises(RepositoryError, match=r"there is no MODEL/config\.pbtxt"):
            read_models(tmp_path)
        (network(tmp_path) / "net" / "config.pbtxt").write_text("name: {")
        with pytest.raises(RepositoryError, match="the configuration of the model cannot be read"):
            read_models(tmp_path)

    @pytest.mark.integration
    @pytest.mark.parametrize("backend", ["python", "onnxruntime"])
    def test_no_configuration_has_a_queue_policy(self, backend: Any, bundle: Bundle) -> None:
        """A queue policy makes Triton 2.51 wait for its timer of 500 ms, so requests wait in the gateway instead."""
        policy = re.compile(r"queue_policy|priority_levels|priority_queue|max_queue_size|timeout_microseconds")
        for config in model_configs(
            bundle, RepositoryOptions(backend=backend, runner=RunnerName("onnxruntime"), max_queue_delay_us=100)
        ).values():
            assert policy.search(pbtxt(config)) is None


class TestCertificate:
    @pytest.mark.integration
    def test_certificate_and_key_of_each_other(self, tmp_path: Path) -> None:
        made, other = self_signed(tmp_path), self_signed(tmp_path, "other").private_key
        cert, key = made.certificate, made.private_key
        keys = key_file(tmp_path)
        pem = tls_pem(GatewaySettings(keys=keys, tls_cert=cert, tls_key=key))
        assert pem.count("BEGIN") == 2
        assert "\n\n" not in pem
        for wrong in ({"tls_cert": cert, "tls_key": other}, {"tls_cert": cert}, {"tls_cert": keys}):
            with pytest.raises(InputError, match="expected a certificate and its private key"):
                tls_pem(GatewaySettings(keys=keys, **wrong))
        with pytest.raises(InputError, match="--tls-key needs --tls-cert"):
            GatewaySettings(keys=keys, tls_key=key)

    def test_an_expired_certificate_is_refused_with_file_and_date(self, tmp_path: Path) -> None:
        keys = key_file(tmp_path)
        good, old = self_signed(tmp_path, "good", days=400), self_signed(tmp_path, "old", days=-1)
        assert "BEGIN" in tls_pem(GatewaySettings(keys=keys, tls_cert=good.both))
        day = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%d")
        for settings in (
            GatewaySettings(keys=keys, tls_cert=old.both),
            GatewaySettings(keys=keys, tls_cert=old.certificate, tls_key=old.private_key),
        ):
            with pytest.raises(InputError, match=rf"old\.\w+: the certificate expired on {day} at ") as caught:
                tls_pem(settings)
            assert "openssl x509 -noout -enddate" in caught.value.hint


class TestOwnGateway:
    @pytest.mark.integration
    @needs_haproxy
    def test_the_folder_is_complete_and_checked(self, bundle: Bundle, tmp_path: Path) -> None:
        cert = self_signed(tmp_path).both
        out = tmp_path / "gateway"
        arguments = ["--keys", key_file(tmp_path), "--listen", "0.0.0.0", "--tls-cert", cert]  # noqa: S104
        answer = gmmvit_here("gateway", bundle.path, "-o", out, *arguments, "--json")
        assert answer.status == 0, answer.err
        assert json.loads(answer.out)["checked_with"].startswith(haproxy_version(find_haproxy()))
        names = ["bundles.map", "haproxy.cfg", "keys.map", "refuse.lua", "runners.map", "tls.pem"]
        assert sorted(file.name for file in out.iterdir()) == ["alerts.yml", *names]
        assert (out / "alerts.yml").read_bytes() == ALERTS.read_bytes()
        assert {(out / name).stat().st_mode & 0o777 for name in names} == {0o600}
        text = (out / "haproxy.cfg").read_text()
        assert "bind 0.0.0.0:8443 ssl crt tls.pem alpn h2,http/1.1" in text
        assert (out / "bundles.map").read_text() == f"triton {bundle.sha256}\n"
        assert KEY not in (out / "keys.map").read_text()

    @pytest.mark.integration
    @needs_haproxy
    def test_haproxy_starts_with_several_threads_from_another_folder(self, bundle: Bundle, tmp_path: Path) -> None:
        """`haproxy -c` is not enough: it does not load the Lua programs for the other threads."""
        settings = GatewaySettings(keys=key_file(tmp_path))
        gateway_folder(bundle.path, tmp_path / "gateway", settings, ports=PORTS)
        config = tmp_path / "gateway" / "haproxy.cfg"
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            free = [str(each.getsockname()[1]) for each in sockets]
        text = re.sub(r"(?<=bind )(\S+):\d+", lambda match: f"{match[1]}:{free.pop()}", config.read_text())
        assert "nbthread" not in text
        config.write_text(text.replace("global\n", "global\n    nbthread 4\n", 1))
        port = int(re.findall(r"frontend http\n *bind \S+:(\d+)", text)[0])
        process = subprocess.Popen([find_haproxy(), "-db", "-f", config], cwd="/", stderr=subprocess.PIPE, text=True)

        def lives() -> bool:
            assert process.poll() is None, f"HAProxy ended with status {process.returncode}: {process.communicate()[1]}"
            with suppress(OSError):
                return request(f"http://127.0.0.1:{port}", "/v2/health/live", key=None).status == 200
            return False

        try:
            wait_until(lives, "an answer of HAProxy")
        finally:
            process.kill()
            process.communicate()

    @pytest.mark.integration
    def test_without_haproxy_it_is_written_but_not_checked(
        self, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shutil.which", lambda *arguments, **options: None)
        settings = GatewaySettings(keys=key_file(tmp_path))
        written = gateway_folder(bundle.path, tmp_path / "gateway", settings, ports=PORTS)
        assert written.checked_with == ""
        assert "apt-get install haproxy" in written.notes[0]
        with pytest.raises(OutputError, match="exists"):
            gateway_folder(bundle.path, tmp_path / "gateway", settings, ports=PORTS)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["gateway", "MODELS"], "a gateway needs --keys FILE"),
            (["gateway", "MODELS", "--keys", "KEYS", "--ports", "1,2"], "--ports: expected three ports"),
            (["serve", "MODELS", "--max-body", "16777216"], "--max-body needs --gateway"),  # the default
            (["serve", "MODELS", "--request-pixels", "5000000"], "--request-pixels needs a bundle, got a repository"),
            (["serve", "MODELS", "--gateway"], "a gateway needs --keys FILE"),
        ],
    )
    def test_what_does_not_go_together(self, arguments: list[str], message: str, tmp_path: Path) -> None:
        paths = {"KEYS": key_file(tmp_path), "MODELS": network(tmp_path)}
        answer = gmmvit_here(*(paths.get(word, word) for word in arguments))
        assert answer.status == 1
        assert message in answer.err
        assert "hint: " in answer.err


def test_the_client_of_an_expired_certificate_asks_the_operator() -> None:
    request = Request("https://host:8000", "gmmvit", "infer", 1.0, Access())
    reason = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)"
    error = error_from_transport(OSError(reason), request)
    assert "the certificate of https://host:8000 has expired" in str(error)
    assert error.hint.startswith("ask the operator of the service for a new certificate")
    assert "--ca" in error_from_transport(OSError(reason.replace("has expired", "unknown")), request).hint


def test_the_secret_is_not_in_the_text_of_the_options() -> None:
    assert "s3cret" not in repr(ServerOptions(admin_secret="s3cret"))  # noqa: S106


def test_a_log_in_a_folder_that_does_not_exist_names_its_option(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        AccessLog(tmp_path / "none" / "a.log", print)
    assert caught.value.hint.startswith("type --access-log ")
    with pytest.raises(OutputError) as caught:
        ServerLog(None).open(tmp_path / "none" / "a.log")
    assert caught.value.hint.startswith("type --log ")


def test_the_log_of_a_server_without_a_gpu_says_once_that_its_lines_are_no_errors() -> None:
    lines: list[str] = []
    ServerLog(lines.append).read(
        [
            "W1126 pinned_memory_manager.cc] CUDA driver version is insufficient for CUDA runtime version\n",
            "E1126 ensemble_scheduler.cc] CUDA driver version is insufficient for CUDA runtime version\n",
        ]
    )
    assert [line.partition("gmmvit serve: ")[2] for line in lines] == [
        "",
        "Triton sees no GPU and runs on the CPU: its lines about CUDA, NVML and DCGM are no errors",
        "",
    ]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("grpcs://localhost:8000", "type grpcs://localhost:8001, "),
        ("https://localhost:8001", "type https://localhost:8000, "),
        ("http://host:8001", "type http://host:8000, "),
        ("grpc://localhost:8001", "type --bundle BUNDLE to compute without a server, or gmmvit serve BUNDLE "),
        ("https://localhost:8443", "type --bundle BUNDLE to compute without a server, or gmmvit serve BUNDLE "),
    ],
)
def test_the_port_of_the_other_protocol_is_named(url: str, expected: str) -> None:
    error = error_from_transport(
        OSError("no HTTP/2 settings"), Request(url, "gmmvit", "get_model_config", 1.0, Access())
    )
    assert error.hint.startswith(expected)
