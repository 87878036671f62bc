"""Kinds and splits of the data for ``--data`` and ``--calibration``; this module imports no readers."""

from __future__ import annotations

__all__ = ["KINDS", "SPLITS"]

KINDS = ("cifar10", "cifar100", "svhn", "mnist", "tiny-imagenet", "folder", "array", "digits")
SPLITS = ("test", "train")
