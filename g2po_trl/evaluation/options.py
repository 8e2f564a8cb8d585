"""The options of an evaluation: from flags and a YAML file, else from the run that trained the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..engines.registry import ENGINES
from ..engines.sampling import Sampling, reserved_option
from ..environments.episode_limits import EpisodeLimits
from ..environments.loading import beside, bundled_environments, file_of, resolve_agent_name, resolve_environment_name
from ..environments.pool.limits import PoolLimits
from ..runs.run_json import AGENT_ENVIRONMENT, FILE, name_of_agent
from ..utils.errors import G2POError
from ..utils.masking import masked_names
from ..utils.options import option

AGENTS = ("direct", "react", "reflexion")
ENVIRONMENTS = tuple(bundled_environments())
HISTORIES = ("window", "conversation")


@dataclass(kw_only=True)
class EvaluateOptions(Sampling, PoolLimits, EpisodeLimits):
    """Options of `g2po evaluate`.

    For a user's agent, `environment` is `AgentEnvironment`, and `environment_options` names the agent.

    Raises:
        G2POError: for a value out of range, or options that exclude each other.
    """

    model: str = option("Folder, Hub id, or name of a served model.", metavar="NAME", group="model")
    run: Path | None = option(
        "Training run whose settings are the defaults; default: the model's.", None, group="model"
    )
    engine: str = option(
        "Engine of a model in this process.",
        "transformers",
        choices=[name for name, row in ENGINES.items() if row.offline],
        group="model",
    )
    engine_options: dict[str, Any] = option("Passed to the model's constructor.", {}, group="model")
    precision: dict[str, Any] = option("dtype and autocast of a model in this process.", {}, group="model")
    base_url: str | None = option("URL of a server with OpenAI's protocol, up to /v1.", None, group="model")
    key_variable: str = option("Environment variable with the server's key.", "OPENAI_API_KEY", group="model")
    parallel: int = option("Concurrent requests to a server.", 16, within="[1, inf)", group="model")
    environment: str | None = option(f"{', '.join(ENVIRONMENTS)}, or FILE.py:Class.", None, group="tasks")
    environment_options: dict[str, Any] = option("Arguments of FILE.py:Class.", {}, group="tasks")
    panel: str | None = option("Evaluation set of the environment or of the run.", None, group="tasks")
    panel_options: dict[str, Any] = option("Passed to the environment's load_panel.", {}, group="tasks")
    tasks: Path | None = option("File with one task per line, as JSON.", None, metavar="FILE", group="tasks")
    limit: int | None = option("Evaluate only the first N tasks.", None, within="[1, inf)", group="tasks")
    agent: str = option(f"{', '.join(AGENTS)}, or an agent of your own, FILE.py:NAME.", "direct", group="agent")
    trials: int = option("Trials per task (reflexion only).", 3, within="[1, inf)", group="agent")
    prompt: Any = option("FILE.py:TEMPLATE, a PromptTemplate.", None, metavar="NAME", group="agent")
    chat_template_kwargs: dict[str, Any] | None = option("Passed to the chat template.", None, group="agent")
    history: str | None = option("What prompts show of an episode.", None, choices=HISTORIES, group="agent")
    max_turns: int | None = option("Turns of an episode.", None, within="[1, inf)", group="agent")
    history_length: int | None = option("Past steps in a prompt.", None, within="[0, inf)", group="agent")
    max_prompt_length: int | None = option(
        "Tokens of a prompt; longer ones lose history.", None, within="[1, inf)", group="agent"
    )
    temperature: float = option("Sampling temperature; 0 is greedy.", 0.4, within="[0, inf)")
    generation_kwargs: dict[str, Any] | None = option(
        "Further sampling options of the engine.", None, group="sampling"
    )
    seeds: int = option("Number of seeds; seeds 0 … N-1 are played.", 1, within="[1, inf)", group="evaluation")
    output: Path | None = option("Default: evaluations/ENVIRONMENT-AGENT-MODEL.", None, group="evaluation")
    overwrite: bool = option("Delete the earlier evaluation in the output folder.", False, group="evaluation")
    batch_size: int = option("Concurrent episodes.", 32, within="[1, inf)", group="evaluation")
    max_total_tokens: int | None = option(
        "Stop before the next turn once this many were used.", None, within="[1, inf)", group="evaluation"
    )
    max_error_rate: float = option(
        "Exit code 1 above this fraction of environment errors.", 0.1, within="[0, 1]", group="evaluation"
    )

    def __post_init__(self):
        super().__post_init__()
        if not all(self.stop_sequences or ()):
            raise G2POError(f"stop_sequences is {self.stop_sequences}: an empty text ends no completion, remove it")
        if reserved := reserved_option(self.generation_kwargs or ()):
            raise G2POError(f"generation_kwargs has {reserved[0]}: another option or the model sets it; remove it")
        self._choose_environment()
        for one in fields(self):
            for place in masked_names(getattr(self, one.name), one.name):
                raise G2POError(
                    f"{place} was left out of {FILE}, since it looks like a secret: give {one.name} with it, or let "
                    "the environment read it from a variable, passed by environment_variables"
                )
        self._check_combination()
        if self.output is None:
            self.output = Path("evaluations", f"{self.played.split(':')[-1]}-{self.agent}-{Path(self.model).name}")

    @property
    def played(self) -> str:
        """Name of the environment or the agent that is played."""
        is_agent = self.environment == AGENT_ENVIRONMENT
        return name_of_agent(self.environment_options) if is_agent else self.environment

    def _choose_environment(self) -> None:
        """Resolve the names of environment and agent, and find tasks next to their files."""
        own = None
        if not is_missing(self.environment):  # of a run: see `check_is_there`
            self.environment, own = asked_for(self.agent, self.environment)
        if own is not None:
            described = self.environment_options.get("agent")
            same = isinstance(described, Mapping) and same_object(own, described.get("import"))
            self.environment_options = {
                **self.environment_options,
                "agent": {**(described if same else {}), "import": own},
            }
            self.agent = "direct"
        if self.environment == AGENT_ENVIRONMENT:
            self._choose_agent()
        elif self.environment is None:
            where = "is not a folder" if not Path(self.model).is_dir() else f"has no {FILE} that names an environment"
            raise G2POError(f"model is {self.model!r}, which {where}: pass --environment, or the folder of a run")
        elif ":" not in self.environment and self.environment not in ENVIRONMENTS:
            names = ", ".join(ENVIRONMENTS)
            raise G2POError(f"environment is {self.environment!r}: choose one of {names}, or module:Class of your own")
        self.tasks = self.tasks or beside(self.played, "tasks.jsonl")  # as for `g2po check` and `train`

    def _choose_agent(self) -> None:
        options = dict(self.environment_options)
        name = name_of_agent(options)
        if self.agent != "direct":
            raise G2POError(
                f"agent is {self.agent!r}: the run's own agent asks the model, and --agent direct plays it"
            )
        if name is None:
            raise G2POError(
                f"agent has no name in {FILE} (a lambda, a local function, or an AgentCommand that no variable of its "
                "module holds): pass --agent FILE.py:NAME, the agent that was trained"
            )
        check_is_there(name, "agent")
        described = options["agent"] if isinstance(options["agent"], Mapping) else {}
        turns = options.pop("max_turns", None)
        self.max_turns = turns if self.max_turns is None else self.max_turns
        self.environment_options = {**options, "agent": {**described, "import": resolve_agent_name(name)}}

    def _check_combination(self) -> None:
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise G2POError(f"base_url is {self.base_url!r}: write an address, as http://127.0.0.1:8000/v1")
        if self.base_url and self.engine_options:
            raise G2POError(
                f"engine_options is {self.engine_options}: a server (base_url) does not take them; remove it"
            )
        for name in ("history", "prompt") if self.agent != "direct" else ():
            if (value := getattr(self, name)) is not None:
                raise G2POError(
                    f"{name} is {value!r}: --agent {self.agent} has prompts of its own; remove one of them"
                )
        if self.environment in ENVIRONMENTS:
            for name in ("tasks", "environment_options"):
                if value := getattr(self, name):
                    raise G2POError(f"{name} is {value}: {self.environment} takes panel and panel_options instead")
        elif self.panel is not None and (self.tasks is None or self.tasks.stem != self.panel):
            raise G2POError(
                f"panel is {self.panel!r}, and {self.played} has no evaluation sets, as bundled environments and "
                "runs do: pass --tasks FILE instead"
            )


def asked_for(agent: str, environment: str | None) -> tuple[str | None, str | None]:
    """Return the full names of the environment and of the user's own agent, if there is one."""
    if agent in AGENTS:
        return environment and resolve_environment_name(environment), None
    if ":" not in agent and not agent.endswith(".py"):
        raise G2POError(
            f"agent is {agent!r}: choose {', '.join(AGENTS)}, or name your own agent, as FILE.py or FILE.py:NAME"
        )
    if environment not in (None, AGENT_ENVIRONMENT):
        raise G2POError(f"agent is {agent!r} and environment is {environment!r}: an agent brings its own; remove one")
    return AGENT_ENVIRONMENT, resolve_agent_name(agent)


def same_object(asked: str, of_run: str | None) -> bool:
    """Return whether a name means the environment or agent of a run.

    Equivalent names: `game.py:Game`, `/path/to/game.py:Game`, `game:Game`, and `game.py`. Another file of that name is
    accepted only if the run's file does not exist any more, since projects may have equal names of files and classes.
    """
    if of_run is None:
        return False
    (file, name), (of_file, of_name) = _located(asked), _located(of_run)
    was_moved = is_missing(of_run) and file.name == of_file.name
    return (file == of_file or was_moved) and (name == of_name or asked.endswith(".py"))


def _located(name: str) -> tuple[Path, str]:
    """Return the file of a module, if it is one in the current folder, and the name of an object in it."""
    module, _, attribute = name.partition(":")
    return Path(module if module.endswith(".py") else f"{module}.py").resolve(), attribute


def check_is_there(name: str, what: str) -> None:
    """Raise `G2POError` if the file of a run's environment or agent does not exist any more."""
    if is_missing(name):
        raise G2POError(
            f"{what} is {name} in {FILE}, and there is no such file: pass --{what} FILE.py:NAME, its new place; the "
            "run's settings and tasks are kept"
        )


def is_missing(name: str | None) -> bool:
    """Return whether a name has a file that does not exist."""
    return file_of(name).suffix == ".py" and not file_of(name).is_file()
