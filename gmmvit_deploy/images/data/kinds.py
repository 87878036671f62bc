"""The kinds and splits of data that the options ``--data`` and ``--calibration`` accept.

The command line imports this module without importing the readers of the data.
"""

from __future__ import annotations

__all__ = ["KINDS", "SPLITS"]

KINDS = ("cifar10", "cifar100", "svhn", "mnist", "tiny-imagenet", "folder", "table", "array", "digits")
SPLITS = ("test", "train")
