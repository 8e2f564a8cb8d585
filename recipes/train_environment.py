# /// script
# requires-python = ">=3.11"
# dependencies = ["g2po-trl"]
# [tool.uv.sources]
# g2po-trl = { path = ".." }
# ///
"""Train on your own environment, or your own agent, by G2PO; `g2po train my_game.py:MyGame` runs this script.

    python recipes/train_environment.py --environment my_game.py:MyGame --tasks tasks.jsonl --config config.yaml
    python recipes/train_environment.py --agent my_agent.py --tasks tasks.jsonl --config config.yaml

Both are named as for `g2po check`: an environment by `module:Class`, `file.py:Class` or an OpenEnv server's address,
an agent by `file.py` or `file.py:NAME`.
Any field of `ScriptArguments`, `G2POConfig` and TRL's `ModelConfig` is a flag and a YAML key; flags win.
`--resume-from-checkpoint auto` continues the run in `output_dir` if there is one.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import asdict, dataclass

from trl import ModelConfig, get_peft_config, get_quantization_config

from g2po_trl import G2POConfig, G2POTrainer, PromptTemplate, tasks_dataset
from g2po_trl.cli.recipe import parse_arguments, run_recipe, starting_point, tokenizer_with_template
from g2po_trl.cli.recipe_files import keys_beside, tasks_beside
from g2po_trl.environments.loading import load, load_template
from g2po_trl.environments.tasks import split_tasks
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.options import Options, option

DEFAULT_CONFIG = keys_beside  # config.yaml and tasks.jsonl in the folder of the environment's or agent's file


@dataclass
class OwnArguments(Options):
    """What is played: an environment or an agent, its tasks and its prompts."""

    environment: str | None = option("module:Class, file.py:Class, or an OpenEnv server's address.", None)
    agent: str | None = option(
        "Instead of an environment: file.py:NAME, a function (task, client) or an AgentCommand.", None
    )
    tasks: str | None = option(
        "File with one task per line, as JSON: the arguments of reset, or the agent's task.", None
    )
    eval_tasks: str | None = option("File with the held-out tasks. None: see num_eval_tasks.", None)
    num_eval_tasks: int | None = option(
        "Number of held-out tasks, the last lines of `tasks`. None: a fifth. Unused with eval_tasks.", None
    )
    chat_template: str | None = option("File with a Jinja chat template, for a model that has none.", None)
    prompt: str | None = option("module:TEMPLATE or file.py:TEMPLATE, a PromptTemplate. None: the default.", None)

    def __post_init__(self):
        super().__post_init__()
        if (self.environment is None) == (self.agent is None):
            both = "None" if self.agent is None else "both given"
            raise G2POError(
                f"environment and agent are {both}: pass --environment FILE.py:Class or --agent FILE.py:NAME"
            )
        if self.agent is not None and self.prompt is not None:
            raise G2POError(f"prompt is {self.prompt!r}: an agent writes its prompts itself, leave it out")
        if self.tasks is None:
            raise G2POError("tasks is None: pass --tasks FILE, one task per line, as JSON")

    def load_prompt(self) -> PromptTemplate | None:
        """Return the template that `prompt` names."""
        return load_template(self.prompt) if self.prompt else None


@dataclass
class ScriptArguments(OwnArguments):
    agent_state_key: str | None = option(
        "file.py:FUNCTION, from the messages of an agent's request to its state key.", None
    )

    def __post_init__(self):
        super().__post_init__()
        if self.agent_state_key is not None and self.agent is None:
            raise G2POError("agent_state_key has no effect without agent: set Observation.state_key instead")


TYPES = (ScriptArguments, G2POConfig, ModelConfig)


def main(trainer_class: type[G2POTrainer] = G2POTrainer) -> None:
    script_args, args, model_args = parse_arguments(TYPES, DEFAULT_CONFIG, tasks_beside)
    if model_args.model_name_or_path is None:
        raise G2POError("model_name_or_path is None: pass --model, a folder or a Hub id")
    checkpoint = starting_point(args)
    args.eval_on_start = checkpoint is None

    # data
    train, held_out = split_tasks(script_args.tasks, script_args.eval_tasks, script_args.num_eval_tasks)
    shared = sum(row in train for row in held_out)
    if args.process_index == 0:
        also = f", {shared} of them trained on" if shared else ""
        print(f"train: {len(train)} tasks\nevaluation: {len(held_out)} tasks{also}", flush=True)

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
        prompt_template=script_args.load_prompt(),
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    settings = {"script": asdict(script_args), "model": asdict(model_args)}
    panel = "Evaluation tasks (some were trained on)" if shared else "Held-out tasks"
    run_recipe(trainer, checkpoint, settings, panel=panel)


if __name__ == "__main__":
    main()
