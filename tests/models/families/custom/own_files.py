"""Python files of a user, for tests: a small network that records every run of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gmmvit_deploy.files.writing import sha256_of_bytes
from gmmvit_deploy.models.families import custom
from gmmvit_deploy.models.families.custom import OwnFile, model
from tests.documented import PAGES, blocks

IMAGE = ("--image-size", "16", "--set", "channels=3")
LABELS = "a,b,c,d,e"
ARGUMENTS: dict[str, Any] = {"depth": 2, "heads": 2}
PRINT = "print('a line on stdout')"
NETWORK = """
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, D = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.proj(x.transpose(1, 2).reshape(B, N, D))


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


class Block(nn.Module):
    def __init__(self, dim, heads, rate):
        super().__init__()
        self.rate = rate
        self.norm, self.attn = Norm(dim), Attention(dim, heads)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, depth=1, heads=1, dim=16, classes=5):
        super().__init__()
        rates = [x.item() for x in torch.linspace(0, 0.1, depth)]  # reads values of tensors
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.ModuleList(Block(dim, heads, rate) for rate in rates)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))
"""


def documented_code() -> str:
    """Return the file of the example in ``docs/pages/models/own_class.md``."""
    page = PAGES / "models" / "own_class.md"
    (block,) = (block for block in blocks(page, page.read_text(encoding="utf-8")) if block.language == "python")
    return block.text


def own_file(folder: Path, code: str = "", *, name: str = "mine.py") -> Path:
    """Write the network, then ``code``; each run of the file adds a line to the file ``runs`` in the folder."""
    path = folder / name
    path.write_text(
        f"open({str(folder / 'runs')!r}, 'a').write('run\\n')\n{PRINT}\n{NETWORK}\n{code}", encoding="utf-8"
    )
    return path


def with_code(folder: Path, code: str) -> OwnFile:
    """Return the file with the network and this code, as an option names it."""
    path = own_file(folder, code)
    return OwnFile(path=str(path), sha256=sha256_of_bytes(path.read_bytes()), source=path.read_bytes())


def save_weights(source: Path, path: Path, *, prefix: str = "", cls: str = "Net", **arguments: Any) -> torch.nn.Module:
    """Save random weights of a class of the file, under ``model`` with a prefix, and return the network."""
    space: dict[str, Any] = {"__name__": "training"}
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), space)  # noqa: S102 - our own test file
    torch.manual_seed(0)
    network: torch.nn.Module = space[cls](**arguments).eval()
    torch.save({"model": {f"{prefix}{name}": tensor for name, tensor in network.state_dict().items()}}, path)
    return network


def forget_files(patch: pytest.MonkeyPatch) -> None:
    """Withdraw every permission of this process, as if a new process had started."""
    patch.setattr(custom, "_PERMITTED", {})
    patch.setattr(model, "_MODULES", {})
