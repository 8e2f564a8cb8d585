"""`g2po env`: the versions and GPUs of this machine, for bug reports."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from ..parser import parse

PACKAGES = ("g2po-trl", "trl", "transformers", "torch", "accelerate", "peft", "datasets", "numpy")
OPTIONAL = ("vllm", "deepspeed", "bitsandbytes", "alfworld", "textworld", "openai", "openenv")


def main(argv: Sequence[str] | None = None) -> None:
    parse((), argv, command="g2po env", description="Print the versions and GPUs of this machine, for bug reports.")
    print(f"{'python':14} {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs")
    for name in (*PACKAGES, *OPTIONAL):
        try:
            print(f"{name:14} {version(name)}")
        except PackageNotFoundError:
            if name in PACKAGES:
                print(f"{name:14} not installed")
    import torch

    devices = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
    print(f"{'GPUs':14} {', '.join(devices) or 'none'}")
