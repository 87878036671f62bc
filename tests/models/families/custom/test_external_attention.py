"""The documented class with single-head external attention, whose constructor ties two memories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gmmvit_deploy.checkpoints.loading import load_checkpoint
from gmmvit_deploy.models.sources.hints import LoadHints
from tests.models.families.custom.own_files import documented_code, save_weights


def trained(source: Path, path: Path) -> nn.Module:
    """Save weights as after training on a GPU: statistics other than 0 and 1, and two memories that differ."""
    network: Any = save_weights(source, path, cls="Classifier")
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
        network.attention.linear_1.weight = nn.Parameter(torch.randn(network.attention.linear_1.weight.shape))
    torch.save({"model": network.state_dict()}, path)
    return network


def test_both_memories_have_the_values_of_the_file(tmp_path: Path) -> None:
    """The constructor makes the second memory a view of the first; the file holds two that differ."""
    source = tmp_path / "external.py"
    source.write_text(documented_code(), encoding="utf-8")
    network = trained(source, tmp_path / "external.pth")
    hints = LoadHints(model=f"{source}:Classifier", image_size=16, channels=3)
    model = load_checkpoint(tmp_path / "external.pth", hints).model
    images = torch.randn(4, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), network(images))
