"""Check an environment or an agent before training: play it at random and report findings, each with a remedy.

    g2po check                                           # environment.py here, or agent.py; their tasks.jsonl
    g2po check module:Environment --task '{"seed": 1}' --episodes 8 --max-turns 30
    g2po check --agent agent.py                          # an agent, with random answers
    g2po check --model FOLDER                            # a few episodes with a model, also --base-url
    g2po check environment.py --show [--model FOLDER]    # the first prompt; with a model, exactly what it reads
    g2po check runs/my-run                               # what a run plays

The environment may be a `TextEnvironment`, a tool-based class as for TRL (its tools are then called at random), a
dictionary of several, or the address of an OpenEnv server, `http://127.0.0.1:8000`. Exit code 1 if there is an error.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...check.examine import Examination
from ...check.findings import Finding, Kind, has_errors, learns_nothing, worst_first
from ...check.play import TEXTS
from ...engines.sampling import Sampling
from ...environments.episode_limits import EpisodeLimits
from ...environments.loading import file_of, load, load_template, resolve_agent_name, resolve_environment_name
from ...environments.pool.limits import PoolLimits
from ...environments.pool.pool import EnvironmentPool
from ...environments.setup import agent_factory, check_start, played_as
from ...environments.several import COLUMN, environments_of, player_of
from ...environments.tasks import check_task_columns
from ...evaluation.agents import DirectAgent
from ...prompts.conversation import message_text
from ...prompts.template import PromptTemplate
from ...rollout.actor import PromptActor
from ...rollout.episode import Episode
from ...rollout.stats import RolloutStats
from ...runs.run_json import load_prompt
from ...utils.errors import G2POError
from ...utils.options import option, require
from ...utils.show import printable, wrapped
from ..parser import parse
from ..recipe_files import ENVIRONMENT, check_model, environment_and_tasks, environment_or_agent, keys_beside, tasks_of

TURNS, EXPERT_EPISODES = 30, 4  # of each task: an expert may be random


@dataclass
class CheckOptions(PoolLimits, EpisodeLimits):
    """Options of `g2po check`."""

    environment: str | None = option(
        "or module:Class, a server, a run", None, positional=True, metavar="[FILE[:Class]]"
    )
    agent: str | None = option("function (task, client) or AgentCommand", None, metavar="FILE[:NAME]")
    agent_state_key: str | None = option("FILE:FUNCTION: messages -> key", None, metavar="NAME", needs="agent")
    response: list[str] = option("a text that the random model may answer; may be repeated", [], needs="agent")
    environment_options: dict[str, Any] = option("arguments of the environment", {}, needs="agent=None")
    task: list[dict[str, Any]] = option("a dataset row as JSON; may be repeated", [], metavar="JSON")
    tasks: Path | None = option("default: tasks.jsonl; 5 rows are played, 2 with a model", None, metavar="FILE")
    episodes: int | None = option("episodes of each task; default: 8, 4 with a model", None, within="[1, inf)")
    max_turns: int | None = option(f"default: max_turns of config.yaml, else {TURNS}", None, within="[1, inf)")
    show: bool = option("print the first prompt of the first task", False)
    prompt: str | None = option("module:TEMPLATE", None, metavar="NAME", needs="show|model")
    model: str | None = option("play a few episodes with this model; with --show: use its chat template", None)
    base_url: str | None = option("with --model: URL of a server, up to /v1", None, metavar="URL", needs="model")

    def __post_init__(self):
        super().__post_init__()
        self.plays = self.model is not None and not self.show
        useless = {"response": "with --model"} if self.plays else {"max_episode_tokens": "without a model that plays"}
        useless |= {"base_url": "with --show"} if self.show else {}
        for name, where in useless.items():
            value = getattr(self, name)
            require(not value, name, value, f"it has no effect {where}; leave it out")
        environment, self.agent = environment_or_agent(self.environment, self.agent)
        self.name = self.agent or environment or ENVIRONMENT


def main(argv: Sequence[str] | None = None) -> None:
    """Check. Exit code 1 if there is an error."""
    options, _ = parse((CheckOptions,), argv, command="g2po check", description=__doc__)
    name, model = (resolve_agent_name if options.agent else resolve_environment_name)(options.name), options.model
    if options.agent:
        environment, tasks, run = None, tasks_of(name, options.task, options.tasks), {}
    else:
        environment, tasks, run = environment_and_tasks(name, options.task, options.tasks)
    config = run.get("play") or keys_beside({"environment": name})
    given = {one.name: getattr(options, one.name) for one in fields(EpisodeLimits)}
    given = {name: value for name, value in given.items() if value is not None}
    limits = EpisodeLimits.of(SimpleNamespace(**{"max_turns": TURNS, **config, **given}))
    if options.agent:
        key = load(options.agent_state_key) if options.agent_state_key else None
        environment = agent_factory(name, limits.max_turns, key)
    elif options.environment_options:
        environment = partial(environment, **options.environment_options)
    wording, own_model = options.prompt or config.get("prompt"), config.get("model_name_or_path")
    template = load_template(wording) if wording else load_prompt(run["prompt"]) if run.get("prompt") else None
    if model:
        from ...config import G2POConfig  # with torch, which is slow to import

        config = {field.name: field.default for field in fields(G2POConfig)} | dict(config)
        if not options.base_url:
            check_model("model", model)
    if options.show:
        print(printable(FirstPrompt(environment, tasks[0], limits, template, config).text(model)))
        return
    of_each = defaultdict(list)
    for task in tasks:
        of_each[str(task.get(COLUMN))].append(task)
    most = max(2 if options.plays else 5, len(options.task))
    tasks = [task for rows in of_each.values() for task in rows[:most]]
    number, texts = options.episodes or (4 if options.plays else 8), options.response or TEXTS
    ignores = (run.get("trainer") or config).get("state_key_ignores")
    known_by = None if options.base_url else model or own_model
    examination = Examination(environment, tasks, number, limits, PoolLimits.of(options), ignores, texts, known_by)
    if options.plays:
        from ...evaluation.chat_models import ServerChat, load_local

        settings = SimpleNamespace(**config)
        load_chat = partial(ServerChat, options.base_url) if options.base_url else load_local
        with closing(load_chat(model, chat_template_kwargs=settings.chat_template_kwargs)) as chat:
            findings = examination.with_model(chat, Sampling.of(settings), settings, template)
    else:
        findings = examination.at_random()
    expert = None
    if file_of(name).suffix == ".py" and not has_errors(findings) and not environments_of(environment):
        from ...teach.experts import find_expert

        expert = find_expert(name)
        if expert is not None and not options.plays:
            findings = _with_expert(findings, expert, examination)
    print(*(wrapped(printable(str(finding)), indent=10) for finding in findings), sep="\n")
    if has_errors(findings):
        sys.exit(1)
    print(f"Next: {_next(options, name, own_model, expert is not None, findings)}")


def _with_expert(findings: list[Finding], expert: Callable, examination: Examination) -> list[Finding]:
    """Return the findings with those of an expert's episodes, which refute or repeat some of them."""
    from ...teach.experts import expert_play

    try:
        tasks = [task for task in examination.tasks for _ in range(EXPERT_EPISODES)]
        factory, rows, answer = expert_play(examination.environment_factory, expert, tasks, examination.episode_limits)
        of_expert = replace(examination, environment_factory=factory, tasks=rows, episodes=1).with_expert(answer)
    except G2POError as error:
        return worst_first([*findings, Kind.REFUSED.found(error=f"the expert: {error}")])
    refuted = set() if any(found.kind is Kind.EXPERT_FAILS for found in of_expert) else {Kind.NO_REWARD}
    return worst_first([*of_expert, *(finding for finding in findings if finding.kind not in refuted)])


def _next(options: CheckOptions, name: str, model: str | None, has_expert: bool, findings: Sequence[Finding]) -> str:
    """Return the next command, or what has to change before it. `name`: the full one; `model`: config.yaml's."""
    if Path(name).is_dir():
        return shlex.join(["g2po", "evaluate", "--model", name])
    if options.environment_options:
        return "write functools.partial(…) with the options into a file; then g2po train FILE.py:NAME --model MODEL"
    words = ["--agent", options.name] if options.agent else [options.name]
    if words[-1].endswith(".py") and not options.agent:  # `g2po train FILE.py` is a script
        words = [] if options.name == ENVIRONMENT else [f"{options.name}:{name.rpartition(':')[2]}"]
    words += ["--tasks", str(options.tasks)] if options.tasks else []
    trained = ["--model", options.model] if options.model and not options.base_url else []
    kinds, nothing = {finding.kind for finding in findings}, learns_nothing(findings)
    again = shlex.join(["g2po", "check", *words])
    if Kind.EXPERT_FAILS in kinds or nothing and (Kind.ALL_WON in kinds or options.model and not has_expert):
        return f"what the warnings say, then {again} again"
    if has_expert and (nothing or not options.model):
        return shlex.join(["g2po", "teach", *words, *trained])
    if nothing:
        return f"{again} --model {shlex.quote(model or 'MODEL')} shows whether the model ever succeeds"
    words += ["--agent-state-key", options.agent_state_key] if options.agent_state_key else []
    return shlex.join(["g2po", "train", *words, *(trained or ([] if model else ["--model", "MODEL"]))])


class FirstPrompt:
    """The first prompt of a task, as training makes it: by the same actor, whose engine generates nothing.

    Arguments are the trainer's; `settings` may have `history`, `max_prompt_length` and `chat_template_kwargs`. Raises
    `G2POError` if the environment fails.
    """

    def __init__(
        self,
        environment_factory: Callable,
        task: Mapping[str, Any],
        limits: EpisodeLimits,
        prompt_template: PromptTemplate | None = None,
        settings: Mapping[str, Any] = {},
    ):
        self.settings, self.episode = settings, Episode("task")
        template = prompt_template and prompt_template.of(task.get(COLUMN))
        made, row = player_of(environment_factory, task)
        factory, self.template, self.history = played_as(made, limits, template, settings.get("history"))
        check_task_columns(factory, row)
        with EnvironmentPool(factory, PoolLimits(num_environment_workers=1)) as pool:
            self.episode.open(*check_start(pool, [row]))

    def tokens_for(self, model: str) -> tuple[list[int], str]:
        """Return the prompt's token ids and text for a model. Raises `G2POError` for one that cannot read it."""
        from ...engines.base import Engine  # with torch, which is slow to import
        from ...engines.stop_tokens import get_stop_token_ids_of_checkpoint
        from ...prompts.images import load_processing_class, reads_images
        from ...prompts.tokenization import ChatEncoder

        encode = ChatEncoder(load_processing_class(model), self.settings.get("chat_template_kwargs"))
        engine = Engine(encode.tokenizer, get_stop_token_ids_of_checkpoint(encode.tokenizer, model))
        reads = reads_images(encode.processing_class)
        engine.reads_text_because = None if reads else f"{model} reads only text: pass another"
        limits = {"history": self.history, "max_prompt_length": self.settings.get("max_prompt_length")}
        session = PromptActor(engine, encode, self.template, **limits).session(Sampling(), None, RolloutStats())
        session.ask([self.episode])
        why = f"the first prompt ends the episode: {self.episode.failure_reason or self.episode.error}"
        require(bool(session.asked), "model", model, why)
        ids = list(session.asked[self.episode.number].prompt.ids)
        return ids, encode.tokenizer.decode(ids)

    def text(self, model: str | None = None) -> str:
        """Return the prompt with its length; with a model, as its chat template renders it."""
        if model is not None:
            ids, text = self.tokens_for(model)
            return f"{text}\n--- {len(ids)} tokens ---"
        request = DirectAgent(self.template, history=self.history).ask(self.episode)
        texts = [f"--- {message['role']} ---\n{message_text(message)}" for message in request.messages]
        texts += [f"--- tools ---\n{json.dumps(request.tools, ensure_ascii=False, indent=2)}"] if request.tools else []
        return "\n".join([*texts, f"--- {sum(len(part['content']) for part in request.messages)} characters ---"])
