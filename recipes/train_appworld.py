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

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from trl import ModelConfig, get_peft_config, get_quantization_config

from g2po_envs.appworld import APPWORLD_PROMPT, AppworldEnvironment, Installation
from g2po_envs.appworld.environment import STEP_GRACE
from g2po_envs.appworld.setup import set_up
from g2po_trl import G2POConfig, G2POTrainer, tasks_dataset
from g2po_trl.cli.recipe import parse_arguments, run_recipe, starting_point
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.options import Options, option

DEFAULT_CONFIG = Path(__file__).parent / "appworld" / "tiny.yaml"


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


def main() -> None:
    script_args, args, model_args = parse_arguments(TYPES, DEFAULT_CONFIG)
    checkpoint = starting_point(args)
    args.eval_on_start = checkpoint is None

    # data
    folder = Path(script_args.appworld).expanduser()
    installation = Installation(str(folder.with_name(f"{folder.name}-tiny") if script_args.tiny else folder))
    with args.main_process_first(desc="AppWorld"):
        if script_args.tiny and not (installation.root / "data" / "tasks").exists():
            set_up(installation.directory, tiny=True)
        installation.check()
        splits = (script_args.train_split, script_args.eval_split)
        train, held_out = (installation.task_ids(split, script_args.difficulties) for split in splits)
        report_split = script_args.report_split or ("test_normal" if args.load_best_model_at_end else None)
        reported = installation.task_ids(report_split) if report_split else []
        if set(reported) & set(held_out):
            remedy = "it shares tasks with eval_split, which chooses the checkpoint; name another"
            raise G2POError(f"report_split is {report_split!r}: {remedy}")
    if args.environment_step_timeout <= script_args.code_timeout + STEP_GRACE:
        raise G2POError(
            f"environment_step_timeout is {args.environment_step_timeout:g}: set it above code_timeout + "
            f"{STEP_GRACE:g} = {script_args.code_timeout + STEP_GRACE:g}, or endless code ends a worker"
        )

    if model_args.model_name_or_path is None:
        from g2po_envs.alfworld.tiny import tiny_model_path

        model_args.model_name_or_path = str(tiny_model_path())

    trainer = G2POTrainer(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=tasks_dataset([{"task_id": task_id} for task_id in train]),
        eval_dataset=tasks_dataset([{"task_id": task_id} for task_id in held_out]),
        environment_factory=partial(
            AppworldEnvironment,
            installation,
            key=script_args.key,
            max_turns=args.max_turns,
            code_timeout=script_args.code_timeout,
            refused=tuple(script_args.refused),
            max_worlds=script_args.max_worlds,
            max_memory=script_args.max_server_memory_mb * 2**20,
        ),
        prompt_template=APPWORLD_PROMPT,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
        card_facts={"Training tasks": f"AppWorld {script_args.train_split}, {len(train)} tasks"},
    )
    settings = {"script": asdict(script_args), "model": asdict(model_args)}
    settings["evaluation"] = {
        "environment": "appworld",
        "panel": report_split or script_args.eval_split,
        "panel_options": {
            **{"installation": installation.directory, "key": script_args.key, "max_turns": args.max_turns},
            **{"refused": script_args.refused, "code_timeout": script_args.code_timeout},
            "difficulties": [] if reported else script_args.difficulties,  # all tasks are reported
        },
    }
    report_dataset = tasks_dataset([{"task_id": task_id} for task_id in reported]) if reported else None
    run_recipe(trainer, checkpoint, settings, "AppWorld", report_dataset)


if __name__ == "__main__":
    main()
