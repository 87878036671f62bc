"""A build hook of hatchling: GMMVIT_KERNELS_IN_WHEEL=PLATFORM/openvino-….so adds a compiled library to the wheel.

The wheel then has the tag of the platform.  Without the variable, the wheel is pure.  `release.archives` sets it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsInWheel(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if library := os.environ.get("GMMVIT_KERNELS_IN_WHEEL"):
            path = Path(library)
            build_data["force_include"][library] = f"gmmvit_deploy/runtimes/kernels/{path.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{path.parent.name}"
