"""vLLM's second model runner on a CPU, where its Triton kernels have no compiler: by Triton's own interpreter.

vLLM's CPU build asks for a Triton backend named "cpu", and for a build of vLLM that says "cpu" in its version. Both
are put before it in a folder on PYTHONPATH; the interpreter never calls the backend.
"""

from pathlib import Path

BACKEND = """from triton.backends.compiler import BaseBackend

class Compiler(BaseBackend):
    pass

Compiler.__abstractmethods__ = frozenset()
"""
DRIVER = """import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

class Driver(DriverBase):
    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

Driver.__abstractmethods__ = frozenset()
"""


def second_runner(folder: Path, version: str) -> dict[str, str]:
    """Write what it takes into `folder`; the environment variables of a process that is to use it."""
    backend = folder / "interpreted"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "compiler.py").write_text(BACKEND)
    (backend / "driver.py").write_text(DRIVER)
    for name, its_version in {"interpreted": "1", "vllm": f"{version}+cpu"}.items():
        about = folder / f"{name}-{its_version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {its_version}\n")
        if name == "interpreted":
            (about / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted\n")
    return {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
