"""`g2po teach`: supervised fine-tuning on an expert's actions, as a start for reinforcement learning."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..preflight import check_command
from ..recipe_files import find_config, recipes_folder
from .train import read, run_in_place

HELP = """usage: g2po teach TARGET [--config FILE] [--FIELD VALUE ...]

TARGET      alfworld, webshop. By default SmolLM2-135M-Instruct is taught (Apache-2.0; fetched once), on the CPU if
            there is no GPU.

run         --config FILE              YAML file; flags win. Default: recipes/teach/TARGET.yaml
            --output_dir FOLDER        the taught model
            --resume_from_checkpoint auto                            resume from the last checkpoint
            --seed N
model       --model FOLDER|ID          --model_name_or_path; --dtype, --use_peft (merged at the end)
lessons     --num_demonstrations N     answers of the expert to show, at most
            --learning_rate X  --per_device_train_batch_size N
exam        --target_success X         teaching ends at this success rate on the exam's tasks
            --exam_steps N  --num_exam_tasks N  --temperature X  --max_turns N

Then: g2po train TARGET --model FOLDER, or, for SmolLM2, g2po train TARGET --config smollm2-135m.

--help-all: every flag, with defaults.  --debug: the traceback of an error.
"""


def targets() -> list[str]:
    """Return the environments with a recipe for teaching."""
    return sorted(path.stem.removeprefix("teach_") for path in recipes_folder().glob("teach_*.py"))


def main(argv: Sequence[str] | None = None) -> None:
    try:
        request = read(list(sys.argv[1:] if argv is None else argv))
        if {"-h", "--help"} & set(request.passed):
            print(HELP, end="")
            return
        if request.target not in targets():
            problem = "no target is given" if request.target is None else f"{request.target!r} cannot be taught"
            raise ValueError(f"{problem}: choose one of {', '.join(targets())}")
        if request.processes not in (None, "1") or request.accelerate is not None:
            raise ValueError("num_processes is above 1: teaching takes minutes and runs in one process. Leave it out.")
        words = [] if request.config is None else ["--config", str(find_config(request.config, kind="teach"))]
        words += [] if request.model is None else ["--model_name_or_path", request.model]
        script = recipes_folder() / f"teach_{request.target}.py"
        if not request.help_all:
            check_command(script, [*words, *request.passed])
    except ValueError as error:
        raise SystemExit(str(error)) from error
    run_in_place(script, ["--help"] if request.help_all else [*words, *request.passed])
