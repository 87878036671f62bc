"""torchvision's VisionTransformer with a hidden layer before the classifier (``representation_size``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from gmmvit_deploy import ExportOptions, LoadHints, bundle_from_checkpoint

pytestmark = pytest.mark.integration

vision_transformer = pytest.importorskip("torchvision").models.vision_transformer


def test_the_hidden_layer_is_part_of_the_logits_and_of_the_features(tmp_path: Path) -> None:
    network = vision_transformer.VisionTransformer(
        image_size=16, patch_size=8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=7,
        representation_size=12,
    ).eval()  # fmt: skip
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.save(network.state_dict(), tmp_path / "vit.pth")
    bundle = bundle_from_checkpoint(
        tmp_path / "vit.pth",
        tmp_path / "bundle",
        ExportOptions(input_kind="tensor", outputs=("logits", "features")),
        hints=LoadHints(model="torchvision:VisionTransformer", model_args={"num_heads": 2}),
    )
    images = torch.randn(3, 3, 16, 16)
    session = onnxruntime.InferenceSession(bundle.onnx_path)
    logits, features = session.run(["logits", "features"], {session.get_inputs()[0].name: images.numpy()})
    with torch.inference_mode():
        expected = network(images).numpy()
        head = network.heads.head(torch.from_numpy(features)).numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_allclose(head, expected, atol=1e-5)
