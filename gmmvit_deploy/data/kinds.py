"""The kinds of data that ``--data`` and ``--calibration`` name, for those who only list them."""

from __future__ import annotations

__all__ = ["KINDS", "SPLITS"]

KINDS = ("cifar10", "cifar100", "svhn", "mnist", "tiny-imagenet", "folder", "array", "digits")
SPLITS = ("test", "train")
