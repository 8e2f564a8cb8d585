# /// script
# requires-python = ">=3.11"
# dependencies = ["g2po-trl"]
# [tool.uv.sources]
# g2po-trl = { path = ".." }
# ///
"""Train on your own environment, or your own agent, by G2PO; `g2po train my_game.py` runs this script.

    python recipes/train_environment.py --environment my_game.py:MyGame --tasks tasks.jsonl --config config.yaml
    python recipes/train_environment.py --agent my_agent.py --tasks tasks.jsonl --config config.yaml

Both are named as for `g2po check`: an environment by `module:Class`, `file.py:Class` or an OpenEnv server's address,
an agent by `file.py` or `file.py:NAME`.
Any field of `ScriptArguments`, `G2POConfig` and TRL's `ModelConfig` is a flag and a YAML key; flags win.
`--resume_from_checkpoint auto` continues the run in `output_dir` if there is one.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import asdict, dataclass, field

import torch
from trl import ModelConfig, get_peft_config, get_quantization_config

from g2po_trl import G2POConfig, G2POTrainer, PromptTemplate, tasks_dataset
from g2po_trl.cli.recipe import (
    parse_arguments,
    run_recipe,
    starting_point,
    tokenizer_with_template,
    use_model_arguments,
)
from g2po_trl.environments.loading import load
from g2po_trl.environments.tasks import split_tasks


@dataclass
class ScriptArguments:
    environment: str | None = field(
        default=None, metadata={"help": "module:Class, file.py:Class, or an OpenEnv server's address."}
    )
    agent: str | None = field(
        default=None,
        metadata={"help": "Instead of an environment: file.py:NAME, a function (task, client) or an AgentCommand."},
    )
    agent_state_key: str | None = field(
        default=None,
        metadata={"help": "file.py:FUNCTION, from the messages of an agent's request to its state key."},
    )
    tasks: str | None = field(
        default=None,
        metadata={"help": "File with one task per line, as JSON: the arguments of reset, or the agent's task."},
    )
    eval_tasks: str | None = field(
        default=None, metadata={"help": "File with the held-out tasks. None: see num_eval_tasks."}
    )
    num_eval_tasks: int | None = field(
        default=None,
        metadata={
            "help": "Number of held-out tasks, the last lines of `tasks`. None: a fifth. Unused with eval_tasks."
        },
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "File with a Jinja chat template, for a model that has none."}
    )
    prompt: str | None = field(
        default=None, metadata={"help": "module:TEMPLATE or file.py:TEMPLATE, a PromptTemplate. None: the default."}
    )


def load_tasks(script_args: ScriptArguments) -> tuple[list[dict], list[dict]]:
    """Return the training tasks and the held-out tasks.

    Raises:
        ValueError: if either is empty.
    """
    if script_args.tasks is None:
        raise ValueError("tasks is None: pass --tasks FILE, one task per line, as JSON")
    return split_tasks(script_args.tasks, script_args.eval_tasks, script_args.num_eval_tasks)


def main(trainer_class: type[G2POTrainer] = G2POTrainer) -> None:
    defaults = {}
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):  # TRL's defaults are for GPUs
        defaults = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
    script_args, args, model_args = parse_arguments((ScriptArguments, G2POConfig, ModelConfig), defaults=defaults)
    if (script_args.environment is None) == (script_args.agent is None):
        both = "None" if script_args.agent is None else "both given"
        raise SystemExit(f"environment and agent are {both}: pass --environment file.py:Class or --agent file.py:NAME")
    if model_args.model_name_or_path is None:
        raise SystemExit("model_name_or_path is None: pass --model_name_or_path, a folder or a Hub id")

    # data
    try:
        train, held_out = load_tasks(script_args)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    shared = sum(row in train for row in held_out)
    if args.process_index == 0:
        also = f", {shared} of them trained on" if shared else ""
        print(f"train: {len(train)} tasks\nevaluation: {len(held_out)} tasks{also}", flush=True)

    prompt_template = None
    if script_args.prompt is not None:
        prompt_template = load(script_args.prompt)
        if not isinstance(prompt_template, PromptTemplate):
            raise SystemExit(f"prompt is {script_args.prompt!r}, which is not a PromptTemplate: name one")
    checkpoint = starting_point(args)
    args.eval_on_start = checkpoint is None

    # model
    use_model_arguments(args, model_args)
    tokenizer = None
    if script_args.chat_template is not None:
        tokenizer = tokenizer_with_template(model_args, script_args.chat_template)

    trainer = trainer_class(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=tasks_dataset(train),
        eval_dataset=tasks_dataset(held_out),
        environment_factory=load(script_args.environment) if script_args.environment else None,
        agent=script_args.agent,
        state_key=load(script_args.agent_state_key) if script_args.agent_state_key else None,
        prompt_template=prompt_template,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    settings = {"script": asdict(script_args), "model": asdict(model_args)}
    panel = "Evaluation tasks (some were trained on)" if shared else "Held-out tasks"
    run_recipe(trainer, checkpoint, settings, panel=panel)


if __name__ == "__main__":
    main()
