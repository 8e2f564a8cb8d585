"""Fine-tune a language model on demonstrations in your environment or of your agent, as a start for G2PO.

    g2po teach environment.py        # runs this script, with the tasks and prompts of config.yaml next to it

Demonstrations are episodes of an `expert` in your file, recorded trajectories, or random episodes; those that succeed
are taught. An expert is a function `expert(environment)`, or a method `expert(self)` of the environment's class; of an
agent, a function `expert(messages, tools)`. It returns the next action, or a call `{"name": …, "arguments": {…}}`.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import ModelConfig, SFTConfig

from g2po_recipes.smollm2 import smollm2_path
from g2po_recipes.train_environment import OwnArguments
from g2po_trl import EnvironmentPool, Player, PoolLimits, TextEnvironment, Trajectory, read_jsonl
from g2po_trl.cli.parser import read_config
from g2po_trl.cli.recipe import parse_arguments
from g2po_trl.cli.recipe_files import find_config, keys_beside
from g2po_trl.engines.base import Engine
from g2po_trl.engines.stop_tokens import get_stop_token_ids_of_checkpoint
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.loading import load, load_template
from g2po_trl.environments.setup import agent_factory, played_as
from g2po_trl.environments.several import environments_of
from g2po_trl.environments.tasks import split_tasks, task_id_of
from g2po_trl.prompts.images import reads_images
from g2po_trl.prompts.tokenization import ChatEncoder, get_tokenizer
from g2po_trl.runs.ownership import held
from g2po_trl.teach import experts
from g2po_trl.teach.demonstrations import ExpertActor, build_rows
from g2po_trl.teach.sft import BaseModel, load_base_model, run_teaching
from g2po_trl.teach.validation import SuccessEvaluation, TeachingArguments
from g2po_trl.utils.options import option, require
from g2po_trl.utils.show import printable
from g2po_trl.view.words import failure_kind

Rows = Sequence[dict[str, Any]]
WELL_FORMED = 0.95  # fraction of completions at which training ends, with target_success


@dataclass
class ScriptArguments(OwnArguments, PoolLimits, TeachingArguments):
    train_config: str | None = option("Configuration of the training run. None: config.yaml.", None)
    expert: str | None = option("file.py:FUNCTION. None: `expert` in the file or the class of the environment.", None)
    demonstrations: str | None = option("Recorded trajectories; their successes are played again.", None)
    random_episodes: int = option("Random episodes to play, instead of an expert.", 0, within="[0, inf)")
    num_episodes: int | None = option("Episodes of the expert. None: one per task.", None, within="[1, inf)")
    demonstration_turns: int | None = option("Turns of a demonstration. None: max_turns.", None, within="[1, inf)")
    num_validation_episodes: int = option("Episodes of a validation.", 24, within="[1, inf)")
    chat_template_kwargs: dict[str, Any] | None = option("Variables of the chat template, as JSON.", None)
    history: str | None = option("What prompts show of an episode.", None, choices=("window", "conversation"))
    max_prompt_length: int | None = option("Maximum number of tokens of a prompt.", 2048, within="[1, inf)")

    def __post_init__(self):
        super().__post_init__()
        sources = [self.expert, self.demonstrations, self.random_episodes]
        remedy = "pass one of expert, demonstrations and random_episodes"
        require(sum(map(bool, sources)) < 2, "demonstrations", self.demonstrations, remedy)


def find_play(options: ScriptArguments, turns: int) -> tuple[Callable[[], TextEnvironment], dict[str, Any]]:
    """Return the environment of episodes of `turns` turns, and fields of their `PromptActor`, as the trainer does."""
    made = agent_factory(options.agent, turns) if options.agent else load(options.environment)
    several = isinstance(made, Mapping) or bool(environments_of(made))
    require(not several, "environment", options.environment, "it has several: teach one after the other, by name")
    prompt = load_template(options.prompt) if options.prompt else None
    factory, template, history = played_as(made, EpisodeLimits(turns), prompt, options.history)
    return factory, {"template": template, "history": history, "max_prompt_length": options.max_prompt_length}


def recorded_episodes(path: str, rows: Rows) -> tuple[list[Trajectory], Rows]:
    """Return the successful trajectories of a file whose tasks are among the rows, and these tasks."""
    require(Path(path).is_file(), "demonstrations", path, "pass a file of trajectories, as in a run's trajectories/")
    by_id, recorded = {task_id_of(row): row for row in rows}, list(read_jsonl(path))
    known = [episode for episode in recorded if episode.success and episode.task_id in by_id]
    print(f"{path}: {len(known)} of {len(recorded)} episodes succeed in training tasks", flush=True)
    require(bool(known), "demonstrations", path, "pass trajectories that succeed in training tasks")
    return known, [by_id[episode.task_id] for episode in known]


def demonstrate(options: ScriptArguments, rows: Rows, base_model: BaseModel, seed: int) -> list[Trajectory]:
    """Play demonstrations as the base model would be asked, and return the successful ones.

    Raises:
        G2POError: if there is none, with what happened in the others; and if most answers are too long to be written.
    """
    limits = EpisodeLimits(options.demonstration_turns or options.max_turns)
    factory, prompts = find_play(options, limits.max_turns)
    tasks = list(islice(cycle(rows), options.random_episodes or options.num_episodes or len(rows)))
    if options.demonstrations:
        recorded, tasks = recorded_episodes(options.demonstrations, rows)
        answer = partial(experts.recorded_answer, recorded)
    elif options.random_episodes:
        answer = experts.random_answer
    else:
        expert = load(options.expert) if options.expert else experts.find_expert(options.environment or options.agent)
        remedy = (
            f"write a function expert({'messages, tools' if options.agent else 'environment'}) in the file, which "
            "returns the next action; or pass --demonstrations FILE (trajectories) or --random-episodes N"
        )
        require(expert is not None, "expert", None, remedy)
        if options.agent:
            answer = partial(experts.agent_answer, expert)
        else:
            answer, (factory, tasks) = experts.carried_answer, experts.with_expert(factory, expert, tasks, seed)
    name, processing_class = base_model
    tokenizer = get_tokenizer(processing_class)
    engine = Engine(tokenizer, get_stop_token_ids_of_checkpoint(tokenizer, name))
    remedy = f"{name} has no processor of images that can be loaded here: pass a vision-language model"
    engine.reads_text_because = None if reads_images(processing_class) else remedy
    encode = ChatEncoder(processing_class, options.chat_template_kwargs)
    actor = ExpertActor(engine, encode, history_length=options.history_length, expert=answer, seed=seed, **prompts)
    with EnvironmentPool(factory, PoolLimits.of(options)) as pool:
        trajectories, _ = Player(pool, actor, limits).play(tasks)
    successes = [episode for episode in trajectories if episode.success]
    reasons = Counter(failure_kind(episode) for episode in trajectories if not episode.success)
    others = "; ".join(f"{number} x {why}" for why, number in reasons.most_common(3))
    remedy = f"no episode succeeds ({others}): correct the expert, take easier tasks, or raise demonstration_turns"
    require(bool(successes), "expert", options.expert, remedy)
    lengths = [len(step.completion_ids) for episode in successes for step in episode.steps]
    most, too_long = options.max_completion_length, sum(length > options.max_completion_length for length in lengths)
    remedy = f"{too_long} of {len(lengths)} answers are longer: set it to {max(lengths)} or more, in config.yaml"
    require(2 * too_long <= len(lengths), "max_completion_length", most, remedy)
    left_out = f"; not taught: {printable(others)}" if others else ""
    print(f"{len(successes)} of {len(trajectories)} demonstrations succeed{left_out}", flush=True)
    return successes


def draw_rows(trajectories: Sequence[Trajectory], most: int, seed: int) -> Dataset:
    """Return samples in random order, as many as have at most `most` actions together, and at least one."""
    rows = build_rows(trajectories)
    random.Random(seed).shuffle(rows)
    actions = list(accumulate(row.pop("actions") for row in rows))
    number = max(1, bisect_right(actions, most))
    print(f"{number} of {len(rows)} samples, with {actions[number - 1]} actions", flush=True)
    return Dataset.from_list(rows[:number])


def training_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults: those of this recipe, and tasks, model, prompts and output_dir of the training's file."""
    keys = read_config(given["train_config"], "train_config") if given.get("train_config") else keys_beside(given)
    shared = {field.name for field in fields(ScriptArguments)} | {"model_name_or_path"}
    return {
        **read_config(find_config("teach/environment")),
        **{name: value for name, value in keys.items() if name in shared},
        "output_dir": f"{keys.get('output_dir', 'runs/model')}-start",
    }


TYPES = (ScriptArguments, SFTConfig, ModelConfig)
DEFAULT_CONFIG = partial(keys_beside, name="teach.yaml")


def main() -> None:
    options, args, model_args = parse_arguments(TYPES, DEFAULT_CONFIG, training_defaults, configs="teach")
    rows, _ = split_tasks(options.tasks, options.eval_tasks, options.num_eval_tasks)
    to_show, to_examine = options.split(rows, args.seed)
    factory, prompts = find_play(options, options.max_turns)
    with held(args.output_dir, "output_dir"):
        base_model = load_base_model(options, args, model_args, smollm2_path)
        if options.chat_template:
            base_model[1].chat_template = Path(options.chat_template).read_text(encoding="utf-8")
        shown = demonstrate(options, to_show, base_model, args.seed)
        validation = SuccessEvaluation(
            factory,
            list(islice(cycle(to_examine), options.num_validation_episodes)),
            prompts.pop("template"),
            options,
            target_valid=WELL_FORMED,
            prompts=prompts,
            chat_template_kwargs=options.chat_template_kwargs,
            limits=PoolLimits.of(options),
        )
        samples = draw_rows(shown, options.num_demonstrations, args.seed)
        last = run_teaching(args, model_args, base_model, samples, validation, shown)
    name = (options.environment or options.agent).removeprefix(f"{Path.cwd()}/")
    following = f"g2po train {f'--agent {name}' if options.agent else name} --model {args.output_dir}"
    more = f"g2po view {args.output_dir}, its validations\nOr: the same command with more --num-episodes\nOr: "
    print(f"Next: {'' if last['reached'] else more}{following}")


if __name__ == "__main__":
    main()
