"""Programs of README and docs run as they stand, but for the size of their model."""

import re
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).parents[2]

PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    if page != "docs/elsewhere.md"  # tests/credit/test_interop.py runs their blocks
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_programs_run(block, tmp_path, tiny_model_dir):
    if "g2po_envs.webshop" in block:
        pytest.importorskip("textblob")
    program = block.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model_dir))
    program = program.replace("max_steps=50", "max_steps=1, bf16=False, use_cpu=True, report_to='none', seed=1")
    program = program.replace("max_completion_length=64", "max_completion_length=4")
    script = tmp_path / "program.py"
    script.write_text(program)
    run = programs.run(script, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    if "trainer.train()" in program:
        assert "iteration   1/1 | success" in run.stdout
        assert list(tmp_path.glob("*/trajectories/train-000001.jsonl"))
