"""Train on your own environment, or your own agent, by G2PO; `g2po train my_game.py:MyGame` runs this script.

    python recipes/train_environment.py --environment my_game.py:MyGame --tasks tasks.jsonl --config config.yaml
    python recipes/train_environment.py --agent my_agent.py --tasks tasks.jsonl --config config.yaml

Both are named as for `g2po check`: an environment by `module:Class`, `file.py:Class` or an OpenEnv server's address,
an agent by `file.py` or `file.py:NAME`.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

from dataclasses import dataclass

from g2po_trl import G2POConfig
from g2po_trl.cli.recipe import Recipe, Task
from g2po_trl.cli.recipe_files import keys_beside
from g2po_trl.environments.loading import beside, load, load_template
from g2po_trl.environments.tasks import split_tasks
from g2po_trl.utils.options import Options, option, require


@dataclass
class OwnArguments(Options):
    """What is played: an environment or an agent, its tasks and its prompts."""

    environment: str | None = option("module:Class, file.py:Class, or an OpenEnv server's address.", None)
    agent: str | None = option("Instead: file.py:NAME, a function (task, client) or an AgentCommand.", None)
    tasks: str | None = option("File with one task per line, as JSON: arguments of reset, or the agent's task.", None)
    eval_tasks: str | None = option("File with the held-out tasks. None: see num_eval_tasks.", None)
    num_eval_tasks: int | None = option("Held-out tasks, the last of `tasks`. None: a fifth, or eval_tasks.", None)
    chat_template: str | None = option("File with a Jinja chat template, for a model that has none.", None)
    prompt: str | None = option("module:TEMPLATE or file.py:TEMPLATE, a PromptTemplate. None: the default.", None)

    def __post_init__(self):
        super().__post_init__()
        is_one = (self.environment is None) != (self.agent is None)
        remedy = f"and agent is {self.agent!r}: pass one of --environment FILE.py:Class and --agent FILE.py:NAME"
        require(is_one, "environment", self.environment, remedy)
        own = self.agent is not None and self.prompt is not None
        require(not own, "prompt", self.prompt, "an agent writes its prompts itself, leave it out")
        if self.tasks is None and (file := beside(self.environment or self.agent, "tasks.jsonl")):
            self.tasks = str(file)
        require(self.tasks is not None, "tasks", None, "pass --tasks FILE, one task per line, as JSON")


@dataclass
class ScriptArguments(OwnArguments):
    agent_state_key: str | None = option("file.py:FUNCTION, from an agent's messages to their state key.", None)

    def __post_init__(self):
        super().__post_init__()
        has_effect = self.agent_state_key is None or self.agent is not None
        require(has_effect, "agent_state_key", self.agent_state_key, "only with agent; or set Observation.state_key")


def tasks(options: ScriptArguments, args: G2POConfig) -> Task:
    """Return the tasks of the files, and the environment or the agent that plays them."""
    rows, held_out = split_tasks(options.tasks, options.eval_tasks, options.num_eval_tasks)
    shared = sum(row in rows for row in held_out)
    return Task(
        train=rows,
        held_out=held_out,
        facts={"Evaluation tasks": f"{len(held_out)}; training tasks: {len(rows)}; {shared} are in both"},
        trainer={
            "environment_factory": load(options.environment) if options.environment else None,
            "agent": options.agent,
            "state_key": load(options.agent_state_key) if options.agent_state_key else None,
            "prompt_template": load_template(options.prompt) if options.prompt else None,
        },
    )


# config.yaml and tasks.jsonl in the folder of the environment's or agent's file
RECIPE = Recipe(tasks, ScriptArguments, keys_beside)

if __name__ == "__main__":
    RECIPE.train()
