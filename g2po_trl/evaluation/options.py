"""The options of an evaluation: from flags and a YAML file, else from the run that trained the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from ..agents.agent import AGENT_ENVIRONMENT
from ..engines.registry import ENGINES
from ..engines.sampling import Sampling, reserved_option
from ..environments import loading
from ..environments.episode_limits import EpisodeLimits
from ..environments.pool.limits import PoolLimits
from ..runs.run_json import FILE, find_run, name_of_agent, panels_in, read_run
from ..utils.errors import G2POError
from ..utils.json import to_json
from ..utils.masking import HIDDEN, masked
from ..utils.options import option, require, without_effect
from .react import OBSERVED

AGENTS = ("direct", "react")
ENVIRONMENTS = tuple(loading.bundled_environments())
HISTORIES = ("window", "conversation")
OFFLINE = tuple(name for name, row in ENGINES.items() if row.offline)
_model, _tasks, _agent = (partial(option, group=group) for group in ("model", "tasks", "agent"))
_server = partial(_model, needs="base_url", resumable=True)
_local = partial(_agent, plays=True, needs="base_url=None")
_evaluation = partial(option, group="evaluation", resumable=True)


@dataclass(kw_only=True)
class EvaluateOptions(Sampling, PoolLimits, EpisodeLimits):
    """Options of `g2po evaluate`.

    For a user's agent, `environment` is `AgentEnvironment`, and `environment_options` names the agent.

    Raises:
        G2POError: for a value out of range, or options that exclude each other.
    """

    model: str = _model("Folder, Hub id, or name of a served model.", metavar="NAME")
    run: Path | None = _model("Run whose settings are the defaults; default: the model's.", None, resumable=True)
    engine: str = _model("Engine of a model in this process.", "transformers", choices=OFFLINE, needs="base_url=None")
    engine_options: dict[str, Any] = _model("Passed to the model's constructor.", {}, needs="base_url=None")
    precision: dict[str, Any] = _model("dtype and autocast of a model in this process.", {})
    base_url: str | None = _model("URL of a server with OpenAI's protocol, up to /v1.", None)
    key_variable: str = _server("Environment variable with the server's key.", "OPENAI_API_KEY")
    parallel: int = _server("Concurrent requests to a server.", 16, within="[1, inf)")
    environment: str | None = _tasks(f"{', '.join(ENVIRONMENTS)}, or FILE.py:Class.", None)
    environment_options: dict[str, Any] = _tasks("Arguments of FILE.py:Class.", {})
    panel: str | None = _tasks("Evaluation set of the environment or of the run.", None)
    panel_options: dict[str, Any] = _tasks("Passed to the environment's load_panel.", {})
    tasks: Path | None = _tasks("File with one task per line, as JSON.", None, metavar="FILE")
    limit: int | None = _tasks("Evaluate only the first N tasks.", None, within="[1, inf)", resumable=True)
    agent: str = _agent(f"{', '.join(AGENTS)}, or an agent of your own, FILE.py:NAME.", "direct")
    prompt: Any = _agent("FILE.py:TEMPLATE, a PromptTemplate.", None, metavar="NAME", needs="agent=direct")
    chat_template_kwargs: dict[str, Any] | None = _agent("Passed to the chat template.", None)
    history: str | None = _agent("What prompts show.", None, choices=HISTORIES, plays=True, needs="agent=direct")
    max_turns: int | None = _agent("Turns of an episode.", None, within="[1, inf)", plays=True)
    history_length: int | None = _agent("Past steps shown.", None, within="[0, inf)", plays=True, needs="agent=direct")
    max_prompt_length: int | None = _local("Tokens of a prompt; longer ones lose history.", None, within="[1, inf)")
    temperature: float = option("Sampling temperature; 0 is greedy.", 0.4, within="[0, inf)")
    generation_kwargs: dict[str, Any] | None = option("More sampling options of the engine.", None, group="sampling")
    seeds: int = _evaluation("Number of seeds; seeds 0 … N-1 are played.", 1, within="[1, inf)")
    output: Path | None = _evaluation("Default: evaluations/ENVIRONMENT-AGENT-MODEL.", None)
    overwrite: bool = _evaluation("Delete the earlier evaluation in the output folder.", False)
    batch_size: int = _evaluation("Concurrent episodes.", 32, within="[1, inf)", resumable=False)
    max_error_rate: float = _evaluation("Exit code 1 above this fraction of environment errors.", 0.1, within="[0, 1]")

    def __post_init__(self):
        super().__post_init__()
        stops = self.stop_sequences
        require(all(stops or ()), "stop_sequences", stops, "an empty text ends no completion, remove it")
        reserved = reserved_option(self.generation_kwargs or ())
        remedy = "another option or the model sets it; remove it"
        require(reserved is None, "generation_kwargs", reserved and reserved[0], remedy)
        is_url = (self.base_url or "http://").startswith(("http://", "https://"))
        require(is_url, "base_url", self.base_url, "write an address, as http://127.0.0.1:8000/v1")
        hidden = next((name for name, value in vars(self).items() if HIDDEN in to_json(value)), "")
        remedy = f"{FILE} leaves secrets out: give {hidden} with them, or environment_variables"
        require(not hidden, hidden, hidden and masked(getattr(self, hidden)), remedy)
        if "dtype" in self.engine_options or self.base_url or self.engine != "transformers":
            self.precision = {}
        self._choose_environment()
        needs = {one.name: one.metadata.get("needs") for one in fields(self)}
        changed = [one.name for one in fields(self) if getattr(self, one.name) not in (one.default, {})]
        for sentence in without_effect(changed, vars(self), needs):
            raise G2POError(f"{sentence}: leave it out", sentence.split()[0])
        is_bundled = self.environment in ENVIRONMENTS
        for name in ("tasks", "environment_options") if is_bundled else ():
            remedy = f"{self.environment} takes panel and panel_options instead; remove it"
            require(not getattr(self, name), name, getattr(self, name), remedy)
        self.tasks = self.tasks or loading.beside(self.played, "tasks.jsonl")  # as for `g2po check` and `train`
        has_panel = is_bundled or self.panel is None or (self.tasks is not None and self.tasks.stem == self.panel)
        remedy = f"{self.played} has no evaluation sets, which bundled environments and runs have; pass --tasks FILE"
        require(has_panel, "panel", self.panel, remedy)
        name = f"{self.played.split(':')[-1]}-{self.agent}-{Path(self.model).name}"
        self.output = self.output or Path("evaluations", name)

    @property
    def sampling(self) -> Sampling:
        """How completions are sampled, and where they end."""
        ends = [] if self.agent == "direct" else [OBSERVED]
        return Sampling.of(self, stop_sequences=[*(self.stop_sequences or ()), *ends] or None)

    @property
    def played(self) -> str:
        """Name of the environment or the agent that is played."""
        is_agent = self.environment == AGENT_ENVIRONMENT
        return name_of_agent(self.environment_options) if is_agent else self.environment

    def _choose_environment(self) -> None:
        self.environment, agent = asked_for(self.agent, self.environment)
        if self.environment == AGENT_ENVIRONMENT:
            described, name = self.environment_options.get("agent"), agent or name_of_agent(self.environment_options)
            remedy = f"it has no name in {FILE}; pass --agent FILE.py:NAME, the agent that was trained"
            require(name is not None, "agent", None, remedy)
            described = described if isinstance(described, Mapping) else {}
            options = {**self.environment_options, "agent": {**described, "import": loading.resolve_agent_name(name)}}
            turns = options.pop("max_turns", None)
            self.max_turns, self.environment_options = self.max_turns or turns, options
            self.agent = "direct" if agent else self.agent
        remedy = f"pass {', '.join(ENVIRONMENTS)}, FILE.py:Class, or the folder of a run as --model"
        is_known = self.environment is not None and (":" in self.environment or self.environment in ENVIRONMENTS)
        require(is_known, "environment", self.environment, remedy)


def asked_for(agent: str, environment: str | None) -> tuple[str | None, str | None]:
    """Return the full names of the environment and of the user's own agent, if there is one."""
    if agent in AGENTS:
        return environment and loading.resolve_environment_name(environment), None
    own, is_alone = loading.resolve_agent_name(agent), environment in (None, AGENT_ENVIRONMENT)
    require(is_alone, "environment", environment, f"the agent {agent} brings its own; remove one of them")
    return AGENT_ENVIRONMENT, own


# Of these a prompted agent has its own.
_GROUPS = ("agent", "Episodes", "Prompts and completions")
_LENGTHS = [one.name for one in fields(EvaluateOptions) if one.metadata["plays"] and one.metadata["group"] in _GROUPS]


def run_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that evaluate a model as it was trained, from the description of its run; `{}` without one.

    Only the agent "direct" uses the run's prompts and lengths. In another environment than the run's, only
    `chat_template_kwargs` is used. What a description of an earlier version lacks has its default. `given` are the
    options that the user set. Raises `G2POError` if the run does not say what was played, or lacks the evaluation set.
    """
    agent = given.get("agent", "direct")
    environment, own_agent = asked_for(agent, given.get("environment"))
    place = given.get("run") or (None if given.get("base_url") else given.get("model"))
    folder = find_run(place) if place else None
    remedy = f"there is no {FILE}, which the trainer writes into its output_dir"
    require(folder is not None or not given.get("run"), "run", str(given.get("run")), remedy)
    run = read_run(folder) if folder else {}
    if not {"play", "trainer"} & run.keys():
        return {}  # another program's run.json, or none
    play = run.get("play")
    require(isinstance(play, Mapping), "play", play, f"{folder / FILE} has to describe it; pass --environment")
    settings, described = dict(run.get("evaluation") or {}), run.get("environment")
    has_tasks = bool(settings) or "environment" not in run
    if not settings and described is not None:
        is_named = isinstance(described, Mapping) and "import" in described and not described.get("args")
        remedy = f"{folder / FILE} has to name its import, and arguments in kwargs; or pass --environment"
        require(is_named, "environment", described, remedy)
        settings = {"environment": described["import"], "environment_options": described.get("kwargs", {})}
    of_run, asked = settings.get("environment"), own_agent or environment
    if own_agent is not None and of_run == AGENT_ENVIRONMENT:  # one without a name in run.json is taken for the asked
        of_run = name_of_agent(settings["environment_options"]) or own_agent
    file = loading.file_of(of_run)
    is_gone = file.suffix == ".py" and not file.is_file()  # then the asked one stands for it
    if asked not in (None, of_run) and not is_gone:
        return {"chat_template_kwargs": play.get("chat_template_kwargs")}
    settings |= {one.name: play[one.name] for one in fields(EvaluateOptions) if one.name in play}
    settings |= {"max_prompt_length": None} if given.get("base_url") else {}
    settings["precision"] = {name: play[name] for name in ("dtype", "autocast") if name in play}
    if agent == "react":
        settings = {name: value for name, value in settings.items() if name not in _LENGTHS}
    else:
        settings |= {"prompt": run["prompt"]} if run.get("prompt") else {}
        regex, kwargs = play.get("vllm_structured_outputs_regex"), settings.get("generation_kwargs") or {}
        settings["generation_kwargs"] = kwargs | ({"structured_outputs": {"regex": regex}} if regex else {})
    if not has_tasks and given.get("tasks") is None:
        panels, name = panels_in(folder), given.get("panel")
        remedy = f"{folder} has {', '.join(panels)}; choose one with --panel, or pass --tasks FILE"
        require(name in panels or name is None and len(panels) == 1, "panel", name, remedy)
        settings["tasks"] = panels[name or next(iter(panels))]
    return settings


def describe_settings(options: EvaluateOptions, settings: Mapping[str, Any]) -> str | None:
    """Return a line that names the run, and the options in place of its settings; `None` without a run."""
    folder = find_run(options.run or options.model) if settings else None
    if folder is None or "precision" not in settings:
        return folder and f"{options.played} is not the environment of {folder}: prompt and settings are not the run's"
    names = settings.keys() - ({"environment_options"} if options.environment == AGENT_ENVIRONMENT else set())
    others = sorted(name for name in names if to_json(getattr(options, name)) != to_json(settings[name]))
    return f"Settings are those of {folder}" + (f", except for {', '.join(others)}" if others else "")
