"""vLLM's second model runner on a CPU, where its Triton kernels have no compiler: by Triton's own interpreter.

vLLM's CPU build asks for a Triton backend named "cpu", and for a build of vLLM that says "cpu" in its version. Both
are put before it in a folder on PYTHONPATH; the interpreter never calls the backend.
"""

from pathlib import Path

FILES = {
    "__init__.py": "",
    "compiler.py": """from triton.backends.compiler import BaseBackend

class Compiler(BaseBackend):
    pass

Compiler.__abstractmethods__ = frozenset()
""",
    "driver.py": """import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

class Driver(DriverBase):
    __init__ = lambda self: None
    is_active = classmethod(lambda cls: True)
    get_current_target = lambda self: GPUTarget("cpu", 0, 1)
    get_active_torch_device = lambda self: torch.device("cpu")

Driver.__abstractmethods__ = frozenset()
""",
}


def second_runner(folder: Path, version: str) -> dict[str, str]:
    """Write what it takes into `folder`; the environment variables of a process that is to use it."""
    backend = folder / "interpreted"
    backend.mkdir(parents=True)
    for name, text in FILES.items():
        (backend / name).write_text(text)
    for name, its_version in {"interpreted": "1", "vllm": f"{version}+cpu"}.items():
        about = folder / f"{name}-{its_version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {its_version}\n")
        if name == "interpreted":
            (about / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted\n")
    return {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
