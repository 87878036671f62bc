"""The gateway's configuration, key file and settings, without a server; HAProxy checks what it would run."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gmmvit_deploy import doctor
from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import InputError, OutputError, RepositoryError, ServerError
from gmmvit_deploy.serving.gateway import files
from gmmvit_deploy.serving.gateway.config import bundles_text, config_text
from gmmvit_deploy.serving.gateway.files import ALERTS, gateway_options, tls_pem
from gmmvit_deploy.serving.gateway.haproxy import check_config, find_haproxy, haproxy_version
from gmmvit_deploy.serving.gateway.keys import map_text, read_keys
from gmmvit_deploy.serving.gateway.options import (
    DEFAULT_BODY_BYTES,
    Front,
    GatewayFiles,
    GatewayOptions,
    GatewaySettings,
    HealthCheck,
    Upstream,
    is_loopback,
    require_insecure,
)
from gmmvit_deploy.serving.gateway.own import gateway_folder
from gmmvit_deploy.serving.gateway.service import behind_gateway
from gmmvit_deploy.serving.model_configs import RepositoryOptions, model_configs
from gmmvit_deploy.serving.model_configs import config_text as pbtxt
from gmmvit_deploy.serving.names import TUNING_FILE
from gmmvit_deploy.serving.served_models import ServedModels, Tuned, read_models, read_tuning
from gmmvit_deploy.serving.server import ADMIN_HEADER, ServerOptions
from tests.cli.terminal import gmmvit_here, without_progress
from tests.serving.gateways import KEY, OTHER_KEY, certificate, key_file, request, require_haproxy
from tests.waiting import wait_until

HASH = hashlib.sha256(KEY.encode()).hexdigest().upper()
PORTS = (8443, 8444, 8445)


def options(**changes: Any) -> GatewayOptions:
    upstream = Upstream(
        name="triton", http="127.0.0.1:8000", grpc="127.0.0.1:8001", metrics="127.0.0.1:8002", bundle="ab12"
    )
    values: dict[str, Any] = {
        "http_bind": "127.0.0.1:8443",
        "grpc_bind": "127.0.0.1:8444",
        "metrics_bind": "127.0.0.1:8445",
        "upstreams": (upstream,),
        "models": ("gmmvit", "gmmvit_network"),
        "health": HealthCheck(path="/v2/models/gmmvit_network/infer", body="A" * 12),
        "files": GatewayFiles(),
    }
    return GatewayOptions(**{**values, **changes})


class TestKeys:
    def test_lines_become_hashes(self, tmp_path: Path) -> None:
        path = key_file(tmp_path, f"web {KEY}  # the web site", "", f"web {OTHER_KEY}", f"batch sha256:{'0a' * 32}")
        keys = read_keys(path)
        assert keys == {HASH: "web", hashlib.sha256(OTHER_KEY.encode()).hexdigest().upper(): "web", "0A" * 32: "batch"}
        assert map_text(keys).splitlines()[0] == f"{HASH} web"
        assert KEY not in map_text(keys)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("web", r"keys\.txt:2: expected NAME KEY, got a line of 1 word$"),
            (f"web {KEY} more", "a line of 3 words"),
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


class TestSettings:
    def test_other_machines_only_with_tls(self, tmp_path: Path) -> None:
        keys = key_file(tmp_path)
        with pytest.raises(InputError, match=r"--listen 0\.0\.0\.0 without TLS") as caught:
            GatewaySettings(keys=keys, listen="0.0.0.0")  # noqa: S104 - refused
        assert "--tls-cert" in caught.value.hint
        GatewaySettings(keys=keys, listen="0.0.0.0", insecure=True)  # noqa: S104 - nothing listens
        GatewaySettings(keys=keys, listen="0.0.0.0", tls_cert=keys)  # noqa: S104 - nothing listens

    @pytest.mark.parametrize(
        "wrong",
        [{"max_body_bytes": 10}, {"json_bytes": -1}, {"in_flight": 0}, {"queue_limit": -1}, {"queue_timeout_ms": 0}],
    )
    def test_numbers_have_a_minimum(self, wrong: dict[str, int], tmp_path: Path) -> None:
        with pytest.raises(InputError, match=rf"{next(iter(wrong))}: expected at least"):
            GatewaySettings(keys=tmp_path, **wrong)

    @pytest.mark.parametrize("large", [{"max_body_bytes": 10**9}, {"json_bytes": 2**22 + 1}])
    def test_sizes_have_a_maximum(self, large: dict[str, int], tmp_path: Path) -> None:
        """HAProxy compares lengths in 32 bits; 16.7 million brackets of JSON end a server with a stack of 1 GiB."""
        with pytest.raises(InputError, match=rf"{next(iter(large))}: expected at most"):
            GatewaySettings(keys=tmp_path, **large)

    def test_addresses(self) -> None:
        assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.3.2.1")))
        assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "example.org", "::")))  # noqa: S104 - refused
        require_insecure("127.0.0.1", insecure=False)
        with pytest.raises(InputError, match="without a key"):
            require_insecure("10.0.0.1", insecure=False)
        require_insecure("10.0.0.1", insecure=True)

    def test_triton_itself_stays_on_loopback_behind_a_secret(self) -> None:
        open_to_all = ServerOptions(host="0.0.0.0", metrics_host="0.0.0.0", http_port=8000)  # noqa: S104 - not used
        behind = behind_gateway(open_to_all, "0123")
        assert (behind.host, behind.metrics_host, behind.http_port) == ("127.0.0.1", None, 0)
        apis = "model-repository,shared-memory,trace,logging,statistics"
        assert behind.restrictions == tuple(
            f"--{option}={apis}:{ADMIN_HEADER}=0123" for option in ("http-restricted-api", "grpc-restricted-protocol")
        )

    def test_tuning_bounds_the_queue(self, tmp_path: Path) -> None:
        settings = GatewaySettings(keys=key_file(tmp_path))
        models = ServedModels(names=("m",), bundle="", health=HealthCheck(path="/"), row_bytes=0)

        def chosen(own: GatewaySettings) -> tuple[int, int]:
            binds = dict.fromkeys(("HTTP", "gRPC", "metrics"), "127.0.0.1:1")
            made = gateway_options(own, models, tmp_path, binds=binds, upstreams=(), files=GatewayFiles())
            return made.in_flight, made.queue_timeout_ms

        assert chosen(settings) == (16, 250)
        (tmp_path / TUNING_FILE).write_text(json.dumps({"rate": 500.0, "bound_ms": 20.0}))
        assert read_tuning(tmp_path) == Tuned(rate=500.0, bound_ms=20.0)
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
        (tmp_path / "net").mkdir()
        (tmp_path / "net" / "config.pbtxt").write_text('name: "net"')
        answer = gmmvit_here("serve", tmp_path, "--gateway", "--keys", key_file(tmp_path))
        assert answer.status == 1
        error, hint = without_progress(answer.err).splitlines()
        assert error == "Error: the gateway needs HAProxy 2.6 or newer, and there is no haproxy on PATH"
        assert hint == "hint: apt-get install haproxy"
        (check,) = [part for name, part in doctor._parts() if name == "haproxy"]
        assert (check().works, check().fix) == (False, "apt-get install haproxy")
        assert "there is no haproxy on PATH" in check().detail

    @pytest.mark.process
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
            {"json_bytes": 4096},
            {"queue_limit": 0},
            {"threads": 1},
            {"front": Front(port=9000, secret="0123")},  # noqa: S106 - of a test
            {"admin": ("x-admin", "0123"), "metrics_address": "127.0.0.1:9001"},
            {"health": HealthCheck(path="/v2/health/ready", infers=False, why_not="large")},
            {"access_log": "127.0.0.1:514"},
            {"files": GatewayFiles(socket="/tmp/with space/admin.sock", exporter="/tmp/with space/exporter.sock")},
        ],
        ids=["default", "json", "no queue", "threads", "front", "admin", "no inference", "syslog", "sockets"],
    )
    @pytest.mark.process
    def test_haproxy_takes_it(self, changes: dict[str, Any], tmp_path: Path) -> None:
        program = require_haproxy()
        made = options(**changes)
        config = tmp_path / "haproxy.cfg"
        config.write_text(config_text(made))
        (tmp_path / "keys.map").write_text(f"{HASH} web\n")
        (tmp_path / "bundles.map").write_text(bundles_text(made.upstreams))
        shutil.copy(Path(files.__file__).with_name("refuse.lua"), tmp_path)
        check_config(program, config)

    @pytest.mark.process
    def test_haproxy_refuses_another(self, tmp_path: Path) -> None:
        program = require_haproxy()
        (tmp_path / "haproxy.cfg").write_text(config_text(options()).replace("option redispatch", "option misspelt"))
        with pytest.raises(ServerError, match="misspelt"):
            check_config(program, tmp_path / "haproxy.cfg")
        assert haproxy_version(program) == haproxy_version(find_haproxy())

    def test_only_listed_paths(self) -> None:
        text = config_text(options())
        assert not re.search(r"logging|trace|shared|repository", text)
        assert "classify" not in re.sub(r"acl classify path /classify", "", text)
        assert "/gmmvit|" not in text
        assert "(gmmvit|gmmvit_network)" in text

    def test_a_name_is_no_pattern(self) -> None:
        assert r"a\.b" in config_text(options(models=("a.b",)))

    def test_every_answer_names_the_bundle(self) -> None:
        assert config_text(options()).count("set-header x-gmmvit-bundle %[srv_name,map(bundles.map)]") == 2
        assert bundles_text(options().upstreams) == "triton ab12\n"


class TestModels:
    @pytest.mark.export
    def test_of_a_bundle(self, bundle: Bundle) -> None:
        models = read_models(bundle.path)
        assert models.names == ("gmmvit", "gmmvit_network", "gmmvit_preprocess")
        assert models.bundle == bundle.sha256
        assert models.health.path == "/v2/models/gmmvit/infer"
        assert models.health.infers
        assert models.row_bytes == 32 * 32 * 3

    def network(self, folder: Path, dims: str, data_type: str = "TYPE_UINT8") -> ServedModels:
        (folder / "net").mkdir()
        config = f'name: "net" input {{ name: "x" data_type: {data_type} dims: {dims} }}'
        (folder / "net" / "config.pbtxt").write_text(config)
        return read_models(folder)

    def test_of_a_network_alone_the_check_sends_a_tensor(self, tmp_path: Path) -> None:
        models = self.network(tmp_path, "[ 4, 4, 3 ]", "TYPE_FP32")
        assert models.health.body == "A" * 192
        assert dict(models.health.headers)["inference-header-content-length"] == "0"
        assert models.bundle == ""

    @pytest.mark.parametrize("dims", ["[ 224, 224, 3 ]", "[ -1, 3 ]"])
    def test_what_cannot_be_checked_by_inference_is_stated(self, dims: str, tmp_path: Path) -> None:
        health = self.network(tmp_path, dims).health
        assert not health.infers
        assert "no model takes an encoded image" in health.why_not
        assert health.path == "/v2/models/net/ready"

    def test_no_repository(self, tmp_path: Path) -> None:
        with pytest.raises(RepositoryError, match=r"there is no MODEL/config\.pbtxt"):
            read_models(tmp_path)
        (tmp_path / "net").mkdir()
        (tmp_path / "net" / "config.pbtxt").write_text("name: {")
        with pytest.raises(RepositoryError, match="the configuration of the model cannot be read"):
            read_models(tmp_path)


QUEUE_POLICY = re.compile(r"queue_policy|priority_levels|priority_queue|max_queue_size|timeout_microseconds")


class TestNoQueuePolicy:
    """A queue policy makes Triton 2.51 wait for its timer of 500 ms, so requests wait in the gateway instead."""

    @pytest.mark.export
    @pytest.mark.parametrize("backend", ["python", "onnxruntime"])
    @pytest.mark.parametrize("instances", [1, 2])
    def test_in_no_configuration_that_we_write(self, backend: Any, instances: int, bundle: Bundle) -> None:
        options = RepositoryOptions(backend=backend, instances=instances, max_queue_delay_us=100)
        for config in model_configs(bundle, options).values():
            assert QUEUE_POLICY.search(pbtxt(config)) is None

    def test_in_no_configuration_of_the_example(self) -> None:
        files = sorted((Path(__file__).parents[2] / "model_repository").glob("*/config.pbtxt"))
        assert len(files) == 3
        assert not [file for file in files if QUEUE_POLICY.search(file.read_text())]

    def test_a_policy_is_seen(self) -> None:
        assert QUEUE_POLICY.search("dynamic_batching { default_queue_policy { max_queue_size: 20 } }")


class TestCertificate:
    @pytest.mark.process
    def test_certificate_and_key_of_each_other(self, tmp_path: Path) -> None:
        cert, key = certificate(tmp_path)
        (tmp_path / "other").mkdir()
        _, other = certificate(tmp_path / "other")
        keys = key_file(tmp_path)
        pem = tls_pem(GatewaySettings(keys=keys, tls_cert=cert, tls_key=key))
        assert pem.count("BEGIN") == 2
        assert "\n\n" not in pem
        for wrong in ({"tls_cert": cert, "tls_key": other}, {"tls_cert": cert}, {"tls_cert": keys}):
            with pytest.raises(InputError, match="expected a certificate and its private key"):
                tls_pem(GatewaySettings(keys=keys, **wrong))
        with pytest.raises(InputError, match="--tls-key needs --tls-cert"):
            GatewaySettings(keys=keys, tls_key=key)


class TestOwnGateway:
    @pytest.mark.export
    @pytest.mark.process
    def test_the_folder_is_complete_and_checked(self, bundle: Bundle, tmp_path: Path) -> None:
        require_haproxy()
        cert, key = certificate(tmp_path)
        out = tmp_path / "gateway"
        arguments = ["--keys", key_file(tmp_path), "--listen", "0.0.0.0", "--tls-cert", cert, "--tls-key", key]  # noqa: S104
        answer = gmmvit_here("gateway", bundle.path, "-o", out, *arguments, "--json")
        assert answer.status == 0, answer.err
        assert json.loads(answer.out)["checked_with"].startswith(haproxy_version(find_haproxy()))
        names = ["bundles.map", "haproxy.cfg", "keys.map", "refuse.lua", "tls.pem"]
        assert sorted(file.name for file in out.iterdir()) == ["alerts.yml", *names]
        assert (out / "alerts.yml").read_bytes() == ALERTS.read_bytes()
        assert {(out / name).stat().st_mode & 0o777 for name in names} == {0o600}
        text = (out / "haproxy.cfg").read_text()
        assert "bind 0.0.0.0:8443 ssl crt tls.pem alpn h2,http/1.1" in text
        assert (out / "bundles.map").read_text() == f"triton {bundle.sha256}\n"
        assert KEY not in (out / "keys.map").read_text()

    @pytest.mark.export
    @pytest.mark.process
    def test_haproxy_starts_with_several_threads_from_another_folder(self, bundle: Bundle, tmp_path: Path) -> None:
        """`haproxy -c` is not enough: it does not load the Lua programs for the other threads."""
        require_haproxy()
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

    @pytest.mark.export
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
            (["gateway", "MODELS", "--keys", "KEYS", "--listen", "10.0.0.1"], "--listen 10.0.0.1 without TLS"),
            (["serve", "MODELS", "--keys", "KEYS"], "--keys needs --gateway"),
            (["serve", "MODELS", "--max-body", str(DEFAULT_BODY_BYTES)], "--max-body needs --gateway"),
            (["serve", "MODELS", "--allow-json", "10"], "--allow-json needs --gateway"),
            (["serve", "MODELS", "--in-flight", "3"], "--in-flight needs --gateway"),
            (["serve", "MODELS", "--queue-limit", "3"], "--queue-limit needs --gateway"),
            (["serve", "MODELS", "--queue-timeout", "3"], "--queue-timeout needs --gateway"),
            (["serve", "MODELS", "--access-log", "log"], "--access-log needs --gateway"),
            (["serve", "MODELS", "--gateway"], "a gateway needs --keys FILE"),
            (["serve", "MODELS", "--gateway", "--keys", "KEYS", "--host", "10.0.0.1"], "--host and --gateway exclude"),
            (["serve", "MODELS", "--host", "10.0.0.1"], "--host 10.0.0.1: other machines could send requests"),
        ],
    )
    def test_what_does_not_go_together(self, arguments: list[str], message: str, tmp_path: Path) -> None:
        (tmp_path / "net").mkdir()
        (tmp_path / "net" / "config.pbtxt").write_text(
            'name: "net" input { name: "x" data_type: TYPE_UINT8 dims: [ 3 ] }'
        )
        paths = {"KEYS": key_file(tmp_path), "MODELS": tmp_path}
        answer = gmmvit_here(*(paths.get(word, word) for word in arguments))
        assert answer.status == 1
        assert message in answer.err
        assert "hint: " in answer.err
