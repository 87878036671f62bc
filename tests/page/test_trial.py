"""The contents of the page, without a browser: answers, agreement with PyTorch and servers, refused inputs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gmmvit_deploy.bundle.artifacts import Bundle
from gmmvit_deploy.errors import ImageError, InputError
from gmmvit_deploy.page import _html as html
from gmmvit_deploy.page._view import data_from_url
from gmmvit_deploy.page.trial import Answer, Trial
from gmmvit_deploy.reports.pictures.attention_of_image import attention_of_bundle
from gmmvit_deploy.runtimes.runners.classify import BundleClassifier
from tests.images.test_preprocess import encoded, photo, png_bomb
from tests.serving.shared import Running


@pytest.fixture(scope="module")
def trial(bundle: Bundle) -> Iterator[Trial]:
    with Trial(bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def data() -> bytes:
    return encoded(photo(48, 40), "PNG")


@pytest.fixture(scope="module")
def answer(trial: Trial, data: bytes) -> Answer:
    return trial.answer(data)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class TestAnswer:
    def test_is_that_of_the_command_line(self, bundle: Bundle, answer: Answer, data: bytes) -> None:
        with BundleClassifier(bundle) as classifier:
            (row,) = classifier.logits([data])
        exponentials = np.exp(row.astype(np.float64) - row.max())
        best = answer.predictions[0]
        assert best.index == row.argmax()
        assert best.label == bundle.manifest.labels[best.index]
        assert best.probability == pytest.approx(exponentials.max() / exponentials.sum())
        assert [p.probability for p in answer.predictions] == sorted(p.probability for p in answer.predictions)[::-1]

    def test_shows_the_pixels_that_the_network_sees(self, bundle: Bundle, answer: Answer, data: bytes) -> None:
        assert np.array_equal(answer.pixels, bundle.manifest.image.pixels_from_bytes(data))

    def test_shows_the_attention_of_the_command_line(
        self, bundle: Bundle, answer: Answer, data: bytes, tmp_path: Path
    ) -> None:
        path = tmp_path / "photo.png"
        path.write_bytes(data)
        pixels, attention = attention_of_bundle(bundle, path)
        assert np.array_equal(answer.pixels, pixels)
        assert answer.attention.to_json() == attention.to_json()
        shown = html.attention_html(answer)
        assert shown.count("<img ") == 2
        without = replace(attention, rollout=None, no_rollout="a <reason>", distances=())
        shown = html.attention_html(replace(answer, attention=without))
        assert "No rollout: a &lt;reason&gt;." in shown
        assert "<img " not in shown

    def test_times_each_step(self, answer: Answer, trial: Trial) -> None:
        assert [step.name for step in answer.steps] == ["decode and resize", trial.runner.label]
        assert all(step.ms > 0 for step in answer.steps)
        assert answer.steps[1].over_before == pytest.approx(answer.steps[1].ms - answer.steps[0].ms)

    def test_agrees_with_pytorch_within_the_limit_of_parity(self, answer: Answer, bundle: Bundle) -> None:
        (agreement,) = answer.agreements
        assert agreement.agrees
        assert agreement.same_class
        assert 0 <= agreement.distance <= agreement.limit
        assert agreement.limit >= 8 * bundle.manifest.float32_noise

    def test_does_not_agree_where_the_logits_are_not_pytorchs(self, trial: Trial, data: bytes) -> None:
        inputs = trial.bundle.inputs_from_pixels(trial.bundle.manifest.image.pixels_from_bytes(data)[None])
        exact, noise = trial._reference_logits(inputs)
        other = exact.astype(np.float32) + np.float32(1e-2)
        assert not trial._agreement("off", other, exact, noise, trial.runner).agrees
        swapped = exact.astype(np.float32)[:, ::-1]
        assert not trial._agreement("swapped", swapped, exact, noise, trial.runner).agrees
        broken = np.full_like(other, np.nan)
        assert not trial._agreement("not finite", broken, exact, noise, trial.runner).agrees

    def test_of_the_golden_images(self, trial: Trial) -> None:
        stored = trial.bundle.golden_set().image_logits
        assert trial.examples
        for image, logits in zip(trial.examples, stored, strict=True):
            answer = trial.answer(image)
            assert answer.predictions[0].index == logits.argmax()
            assert answer.agreements[0].agrees

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "the file is empty"),
            (b"\x89PNG\r\n\x1a\n broken", "the file is not a JPEG"),
            (encoded(photo(48, 40), "PNG")[:500], "the PNG image is damaged or truncated"),
            (png_bomb(8_000, 8_000), "the maximum is 50000000 pixels"),
            (png_bomb(60_000, 60_000), "too large"),
        ],
        ids=["empty", "broken", "cut", "bomb", "huge bomb"],
    )
    def test_images_that_cannot_be_used_are_refused(self, trial: Trial, data: bytes, message: str) -> None:
        with pytest.raises(ImageError, match=message):
            trial.answer(data)

    def test_normalisation_outside_the_graph_is_a_step(self, tensor_bundle: Bundle, data: bytes) -> None:
        with Trial(tensor_bundle, runner="openvino") as trial:
            answer = trial.answer(data)
        assert [step.name for step in answer.steps] == ["decode and resize", "normalise", "openvino"]
        assert answer.agreements[0].agrees


class TestServer:
    def test_that_is_gone_leaves_the_answer_of_the_bundle(self, bundle: Bundle, data: bytes) -> None:
        url = f"http://127.0.0.1:{closed_port()}"
        with Trial(bundle, url=url) as trial:
            answer = trial.answer(data)
        assert answer.predictions
        assert len(answer.agreements) == 1
        assert f"no Triton server answers at {url}" in answer.server_error
        assert "gmmvit serve" in answer.server_error
        shown = html.agreement_html(answer, url=url)
        assert "no answer from the server" in shown
        assert "agrees:" not in shown

    def test_an_address_that_cannot_be_read_is_refused_at_the_start(self, bundle: Bundle) -> None:
        with pytest.raises(InputError, match="server address"):
            Trial(bundle, url="localhost:8001")

    @pytest.mark.parametrize("protocol", ["grpc", "http"])
    def test_answers_as_the_bundle(self, bundle: Bundle, server: Running, data: bytes, protocol: str) -> None:
        url = server.grpc_url if protocol == "grpc" else server.http_url
        with Trial(bundle, url=url) as trial:
            answer = trial.answer(data)
        assert answer.server_error == ""
        assert answer.other_bundle == ""
        local, network, decoding = answer.agreements
        assert (network.program, decoding.program) == (f"triton-{protocol}", f"triton-{protocol} + decoding")
        assert all(agreement.agrees for agreement in (local, network, decoding))
        *_, request, with_decoding = answer.steps
        assert {name.rpartition(" ")[2] for name in request.parts} == {
            "queue",
            "input",
            "infer",
            "output",
            "unexplained",
        }
        assert any("_preprocess " in name for name in with_decoding.parts)
        assert f"The server at {url} agrees" in html.agreement_html(answer, url=url)

    def test_of_another_bundle_is_named(self, tensor_bundle: Bundle, server: Running, data: bytes) -> None:
        with Trial(tensor_bundle, url=server.grpc_url) as trial:
            answer = trial.answer(data)
        assert "not from" in answer.server_error  # it takes other inputs, so no request is sent
        assert len(answer.agreements) == 1


class TestRefused:
    def test_a_bundle_that_does_not_state_its_normalisation(self, tensor_bundles: dict[str, Bundle]) -> None:
        with pytest.raises(InputError, match="no mean and std"):
            Trial(tensor_bundles["vit_gmm"])

    @pytest.mark.parametrize("url", [None, 3, "data:image/png;base64,%%%", "data:text/html;base64,AAAA", "http://x"])
    def test_a_drawing_that_is_no_png(self, url: object) -> None:
        with pytest.raises(InputError, match="expected a PNG as a data URL"):
            data_from_url(url)


class TestFacts:
    def test_parity_at_export(self, bundle: Bundle) -> None:
        numbers = bundle.manifest.export_parity
        shown = html.parity_html(numbers, {})
        assert "Parity at export: passed. " in shown
        assert "onnxruntime" in shown
        worse = html.parity_html({**numbers, "odd_largest_abs": 2 * numbers["limit"]}, {"<b>": "why"})
        assert '<p class="error"><b>Error:</b> Parity at export: FAILED.' in worse
        assert "(odd)" in worse
        assert "&lt;b&gt;: why" in worse
        assert "not checked" in html.parity_html({}, {})

    def test_card(self, bundle: Bundle) -> None:
        card = html.bundle_card(bundle)
        assert card["SHA-256"] == bundle.sha256
        assert card["classes"] == "10"
        assert "32×32, RGB" in card["image"]
        assert card["precisions"] == "fp32"

    def test_text_of_a_bundle_is_escaped(self, answer: Answer) -> None:
        odd = replace(answer.predictions[0], label="<script>alert(1)</script>")
        assert "<script>" not in html.part("predictions", replace(answer, predictions=(odd,), verdict=odd.label))
        assert "<i>" not in html.message_html("<i>")
