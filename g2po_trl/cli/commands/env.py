"""`g2po env`: the versions and GPUs of this machine, for bug reports."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from ...runs.run_json import installed_versions
from ..parser import parse


def main(argv: Sequence[str] | None = None) -> None:
    parse((), argv, command="g2po env", description="Print the versions and GPUs of this machine, for bug reports.")
    print(f"{'python':14} {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs")
    for name, number in installed_versions().items():
        print(f"{name:14} {number}")
    import torch

    devices = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
    print(f"{'GPUs':14} {', '.join(devices) or 'none'}")
