"""Train an agent on AppWorld by G2PO: it writes code that calls everyday apps. Each world runs in its own process.

    python -m g2po_envs.appworld.setup ~/.cache/g2po_trl/appworld                                  # once
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train_appworld.py \
        --config recipes/appworld/qwen2.5-7b.yaml
    python recipes/train_appworld.py          # a tiny model and bundled tasks, to test the installation
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass
from pathlib import Path

from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_envs.appworld import APPWORLD_PROMPT, Installation
from g2po_envs.appworld.environment import STEP_GRACE
from g2po_envs.appworld.setup import set_up
from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Recipe, Task
from g2po_trl.utils.options import Options, option, require


@dataclass
class ScriptArguments(Options):
    appworld: str = option("Folder that `g2po_envs.appworld.setup` made.", "~/.cache/g2po_trl/appworld")
    tiny: bool = option("Set up and play a few bundled tasks, in APPWORLD-tiny.", False)
    eval_split: str = option("Tasks of evaluations.", "dev")
    report_split: str | None = option("Reported tasks. None: eval_split, or test_normal if it chooses.", None)
    difficulties: list[int] = option("Difficulties of tasks, except reported ones. Empty: all.", [])
    refused: list[str] = option("Texts; code that contains one of them is not run.", [])
    code_timeout: float = option("Maximum seconds of a code block.", 40.0, within="(0, inf)")
    key: str = option("State key: 'output' of the code, or 'output and calls'.", "output")


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the tasks, and set the tiny ones up."""
    least, timeout = options.code_timeout + STEP_GRACE, args.environment_step_timeout
    remedy = f"set it above code_timeout + {STEP_GRACE:g} = {least:g}, or endless code ends a worker"
    require(timeout > least, "environment_step_timeout", timeout, remedy)
    folder = Path(options.appworld).expanduser()
    installation = Installation(str(folder.with_name(f"{folder.name}-tiny") if options.tiny else folder))
    if options.tiny and not (installation.root / "data" / "tasks").exists():
        set_up(installation.directory, tiny=True)
    installation.check()
    shown = {"installation": installation.directory, "refused": options.refused, "key": options.key}
    shown |= {"max_turns": args.max_turns, "code_timeout": options.code_timeout}
    reported = options.report_split or ("test_normal" if args.load_best_model_at_end else None)
    rows = installation.rows("train", options.difficulties)
    return Task.of_panels(
        "appworld",
        (options.eval_split, {**shown, "difficulties": options.difficulties}),
        (reported, shown) if reported else None,
        train=rows,
        facts={"Training tasks": f"AppWorld train, {len(rows)} tasks"},
        trainer={"prompt_template": APPWORLD_PROMPT},
    )


RECIPE = Recipe(tasks, ScriptArguments, "appworld/tiny", "AppWorld", tiny_model_path())

if __name__ == "__main__":
    RECIPE.train()
