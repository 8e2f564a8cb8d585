"""Train an agent on AppWorld by G2PO: it writes code that calls everyday apps. Each world runs in its own process.

    python -m g2po_envs.appworld.setup ~/.cache/g2po_trl/appworld                                  # once
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train_appworld.py \
        --config recipes/appworld/qwen2.5-7b.yaml
    python recipes/train_appworld.py          # a tiny model and bundled tasks, to test the installation

Any field of `ScriptArguments`, `G2POConfig` and TRL's `ModelConfig` is a flag and a YAML key; flags win.
`--resume-from-checkpoint auto` continues the run in `output_dir` if there is one.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig

from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_envs.appworld import APPWORLD_PROMPT, AppworldEnvironment, Installation
from g2po_envs.appworld.environment import STEP_GRACE
from g2po_envs.appworld.setup import set_up
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Task, train
from g2po_trl.utils.options import Options, option, require


@dataclass
class ScriptArguments(Options):
    appworld: str = option("Folder that `g2po_envs.appworld.setup` made.", "~/.cache/g2po_trl/appworld")
    tiny: bool = option("Set up and play a few bundled tasks, in APPWORLD-tiny.", False)
    train_split: str = option("Tasks to train on.", "train")
    eval_split: str = option("Tasks of evaluations.", "dev")
    difficulties: list[int] = option("Difficulties of tasks. Empty: all.", [])
    refused: list[str] = option("Texts; code that contains one of them is not run.", [])
    code_timeout: float = option("Maximum seconds of a code block.", 40.0, within="(0, inf)")
    report_split: str | None = option(
        "Tasks to report success on. None: the held-out ones, or others if these choose the best checkpoint.", None
    )
    key: str = option("State key: 'output' of the code, or 'output and calls'.", "output")
    max_worlds: int = option("Number of worlds after which a server is replaced.", 50, within="[1, inf)")
    max_server_memory_mb: float = option("Memory above which a server is replaced.", 2000.0, within="(0, inf)")


TYPES = (ScriptArguments, G2POConfig, ModelConfig)
DEFAULT_CONFIG = Path(__file__).parent / "appworld" / "tiny.yaml"


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the tasks, and set the tiny ones up."""
    least = options.code_timeout + STEP_GRACE
    remedy = f"set it above code_timeout + {STEP_GRACE:g} = {least:g}, or endless code ends a worker"
    timeout = args.environment_step_timeout
    require(timeout > least, "environment_step_timeout", timeout, remedy)
    folder = Path(options.appworld).expanduser()
    installation = Installation(str(folder.with_name(f"{folder.name}-tiny") if options.tiny else folder))
    if options.tiny and not (installation.root / "data" / "tasks").exists():
        set_up(installation.directory, tiny=True)
    installation.check()
    splits = (options.train_split, options.eval_split)
    rows, held_out = (installation.rows(split, options.difficulties) for split in splits)
    report_split = options.report_split or ("test_normal" if args.load_best_model_at_end else None)
    reported = installation.rows(report_split) if report_split else []
    remedy = "it shares tasks with eval_split, which chooses the checkpoint; name another"
    require(not any(row in held_out for row in reported), "report_split", report_split, remedy)
    shown = {"key": options.key, "max_turns": args.max_turns, "code_timeout": options.code_timeout}
    server = {"max_worlds": options.max_worlds, "max_memory": options.max_server_memory_mb * 2**20}
    factory = partial(AppworldEnvironment, installation, refused=tuple(options.refused), **server, **shown)
    return Task(
        train=rows,
        held_out=held_out,
        reported=reported,
        facts={"Training tasks": f"AppWorld {options.train_split}, {len(rows)} tasks"},
        trainer={"environment_factory": factory},
        prompt=APPWORLD_PROMPT,
        evaluation={
            "environment": "appworld",
            "panel": report_split or options.eval_split,
            "panel_options": {
                **{"installation": installation.directory, "refused": options.refused, **shown},
                "difficulties": [] if reported else options.difficulties,  # all tasks are reported
            },
        },
    )


if __name__ == "__main__":
    train(tasks, TYPES, DEFAULT_CONFIG, "AppWorld", tiny_model_path())
