"""Fine-tune a language model on demonstrations in your environment or of your agent, as a start for G2PO.

    g2po teach environment.py        # runs this script, with the tasks and prompts of config.yaml beside the file

Demonstrations are episodes of an `expert` in your file, recorded trajectories, or random episodes; those that succeed
are taught. An expert is a function `expert(environment)`, or a method `expert(self)` of the environment's class; of an
agent, a function `expert(messages, tools)`. It returns the next action, or a call `{"name": …, "arguments": {…}}`.

Any field of `ScriptArguments`, TRL's `SFTConfig` and `ModelConfig` is a flag and a YAML key; flags win.
"""

from g2po_trl.cli.process import set_up_process

set_up_process()  # before torch and TRL are imported

import argparse
import random
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import ModelConfig, SFTConfig

from g2po_recipes.cold_start.demonstrations import ExpertActor, build_rows
from g2po_recipes.cold_start.exam import SuccessEvaluation
from g2po_recipes.cold_start.experts import (
    Expert,
    ExpertEnvironment,
    agent_answer,
    carried_answer,
    find_expert,
    random_answer,
    recorded_answer,
)
from g2po_recipes.cold_start.sft import TeachingArguments, load_base_model, run_teaching
from g2po_trl import EnvironmentPool, Player, PoolLimits, PromptTemplate, TextEnvironment, Trajectory, read_jsonl
from g2po_trl.cli.recipe import parse_arguments, read_chat_template
from g2po_trl.engines.base import Engine
from g2po_trl.engines.sampling import derived_seed
from g2po_trl.engines.stop_tokens import get_stop_token_ids_of_checkpoint
from g2po_trl.environments.adapters.agent import agent_factory
from g2po_trl.environments.adapters.trl_tools import (
    default_history,
    default_prompt_template,
    text_environment_factory,
)
from g2po_trl.environments.loading import load
from g2po_trl.environments.tasks import split_tasks, task_id_of
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.runs.ownership import held
from g2po_trl.utils.options import as_mapping
from g2po_trl.utils.parser import read_config
from g2po_trl.utils.show import printable

DEFAULT_CONFIG = Path(__file__).parent / "teach" / "environment.yaml"
MORE = 10  # times as many demonstrations are suggested where they were too few: teaching ends at its target


@dataclass
class ScriptArguments(PoolLimits, TeachingArguments):
    environment: str | None = field(default=None, metadata={"help": "module:Class, or file.py:Class."})
    agent: str | None = field(default=None, metadata={"help": "Instead of an environment: file.py:NAME."})
    train_config: str | None = field(
        default=None, metadata={"help": "config.yaml of the training, from which tasks, model and prompts are taken."}
    )
    expert: str | None = field(
        default=None,
        metadata={"help": "file.py:FUNCTION. None: `expert` in the file or the class of the environment."},
    )
    demonstrations: str | None = field(
        default=None, metadata={"help": "File of recorded trajectories, whose successful episodes are played again."}
    )
    random_episodes: int = field(default=0, metadata={"help": "Random episodes to play, instead of an expert."})
    num_episodes: int | None = field(
        default=None, metadata={"help": "Episodes of the expert. None: one for each training task."}
    )
    demonstration_turns: int | None = field(
        default=None,
        metadata={"help": "Maximum turns of a demonstration. None: max_turns."},
    )
    num_demonstrations: int = field(default=2048, metadata={"help": "Maximum number of expert actions to train on."})
    target_valid: float = field(
        default=0.95,
        metadata={"help": "Fraction of well-formed completions at which training ends, with target_success."},
    )
    num_exam_tasks: int | None = field(
        default=None,
        metadata={"help": "Training tasks that are only in exams. 0: exams play shown tasks. None: a fifth."},
    )
    num_exam_episodes: int = field(default=24, metadata={"help": "Episodes of an exam."})
    tasks: str | None = field(default=None, metadata={"help": "File with one task per line, as JSON."})
    eval_tasks: str | None = field(
        default=None, metadata={"help": "File with the held-out tasks, which are not used."}
    )
    num_eval_tasks: int | None = field(
        default=None,
        metadata={"help": "Held-out tasks, the last lines of `tasks`, which are not used. None: a fifth."},
    )
    chat_template: str | None = field(default=None, metadata={"help": "File with a Jinja chat template."})
    chat_template_kwargs: str | None = field(
        default=None, metadata={"help": "Variables of the chat template, as JSON."}
    )
    prompt: str | None = field(default=None, metadata={"help": "module:TEMPLATE or file.py:TEMPLATE."})
    history: str | None = field(default=None, metadata={"help": "'window' or 'conversation', as in training."})
    max_prompt_length: int | None = field(default=2048, metadata={"help": "Maximum number of tokens of a prompt."})
    max_turns: int = field(default=50, metadata={"help": "Maximum number of turns of an episode."})
    max_completion_length: int = field(default=512, metadata={"help": "Maximum tokens of a completion in an exam."})
    stop_sequences: list[str] | None = field(default=None, metadata={"help": "Strings at which a completion ends."})

    minimum: ClassVar[dict[str, int]] = {
        **TeachingArguments.minimum,
        **dict.fromkeys(("num_episodes", "num_exam_episodes", "demonstration_turns"), 1),
        **dict.fromkeys(("num_exam_tasks", "random_episodes"), 0),
    }

    def __post_init__(self):
        super().__post_init__()
        if (self.environment is None) == (self.agent is None):
            both = "None" if self.agent is None else "both given"
            raise ValueError(
                f"environment and agent are {both}: pass --environment file.py:Class or --agent file.py:NAME"
            )
        if self.tasks is None:
            raise ValueError("tasks is None: pass --tasks FILE, one task per line, as JSON")
        sources = [name for name in ("expert", "demonstrations", "random_episodes") if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are both given: demonstrations have one source, leave one out")

    def split(self, rows: Sequence[dict[str, Any]], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        if self.num_exam_tasks == 0:
            return list(rows), list(rows)
        if self.num_exam_tasks is None:
            self.num_exam_tasks = max(1, len(rows) // 5)
        return super().split(rows, seed)


@dataclass
class Game:
    """What is played and how it is prompted, the same in demonstrations, exams and the training that follows.

    Args:
        factory: constructs the environment.
        template: wording of prompts.
        prompts: further fields of a `PromptActor`.
        chat_template_kwargs: variables of the chat template.
        limits: number and limits of environment workers.
    """

    factory: Callable[[], TextEnvironment]
    template: PromptTemplate
    prompts: dict[str, Any]
    chat_template_kwargs: dict[str, Any] | None
    limits: PoolLimits


def load_game(script_args: ScriptArguments) -> Game:
    """Return what the arguments describe, as `G2POTrainer` sets it up.

    Raises:
        ValueError: for a value that is not accepted.
    """
    if script_args.history not in (None, "window", "conversation"):
        raise ValueError(f"history is {script_args.history!r}: choose window or conversation")
    wording = load(script_args.prompt) if script_args.prompt else None
    if wording is not None and not isinstance(wording, PromptTemplate):
        raise ValueError(f"prompt is {script_args.prompt!r}, which is not a PromptTemplate: name one")
    agent, turns = script_args.agent, script_args.max_turns
    made = load(script_args.environment) if agent is None else agent_factory(agent, turns)
    history = script_args.history or default_history(made, wording)
    prompts = {"max_prompt_length": script_args.max_prompt_length, "history": history}
    variables = as_mapping("chat_template_kwargs", script_args.chat_template_kwargs)
    return Game(
        text_environment_factory(made, turns, history),
        default_prompt_template(made) if wording is None else wording,
        prompts,
        variables,
        PoolLimits.of(script_args),
    )


@dataclass
class Source:
    """Where demonstrations come from.

    Args:
        kind: "expert", "recorded" or "random", for messages.
        expert: answers observations.
        factory: constructs the environment that is played.
        tasks: arguments of its `reset`, one mapping per episode.
    """

    kind: str
    expert: Expert
    factory: Callable[[], TextEnvironment]
    tasks: list[dict[str, Any]]


def choose_source(script_args: ScriptArguments, rows: Sequence[dict[str, Any]], game: Game, seed: int) -> Source:
    """Return the source of demonstrations that the arguments name.

    Raises:
        ValueError: if there is none.
    """
    if script_args.demonstrations:
        recorded, tasks = recorded_episodes(script_args.demonstrations, rows)
        return Source("recorded", partial(recorded_answer, recorded), game.factory, tasks)
    if script_args.random_episodes:
        return Source("random", random_answer, game.factory, list(islice(cycle(rows), script_args.random_episodes)))
    name = script_args.environment or script_args.agent
    expert = load(script_args.expert) if script_args.expert else find_expert(name)
    if expert is None:
        shown = "environment" if script_args.agent is None else "messages, tools"
        raise ValueError(
            f"{name} has no expert: write a function expert({shown}) in the file, which returns the next action; or "
            "pass --demonstrations FILE (recorded trajectories) or --random_episodes N"
        )
    tasks = list(islice(cycle(rows), script_args.num_episodes or len(rows)))
    if script_args.agent:
        return Source("expert", partial(agent_answer, expert), game.factory, tasks)
    tasks = [
        {"task_id": task_id_of(task), "task": task, "seed": derived_seed(seed, number)}
        for number, task in enumerate(tasks)
    ]
    return Source("expert", carried_answer, partial(ExpertEnvironment, game.factory, expert), tasks)


def recorded_episodes(path: str, rows: Sequence[dict[str, Any]]) -> tuple[list[Trajectory], list[dict[str, Any]]]:
    """Return the successful trajectories of a file whose tasks are among the rows, and these tasks.

    Raises:
        ValueError: if there is none, or the file cannot be read.
    """
    by_id = {task_id_of(row): row for row in rows}
    try:
        recorded = list(read_jsonl(path))
    except OSError as error:
        raise ValueError(f"demonstrations is {path!r}, which cannot be read: {error}") from error
    successes = [t for t in recorded if t.success]
    known = [t for t in successes if t.task_id in by_id]
    if len(known) < len(recorded):
        others = len(recorded) - len(successes), len(successes) - len(known)
        print(
            f"{path}: {len(known)} of {len(recorded)} episodes are played again. Left out: {others[0]} that failed, "
            f"{others[1]} of tasks that are not training tasks",
            flush=True,
        )
    if not known:
        raise ValueError(
            f"demonstrations is {path!r}, which has {len(successes)} successful episodes, none of them of a training "
            "task: pass trajectories of the tasks in `tasks`"
        )
    return known, [by_id[t.task_id] for t in known]


def demonstrate(
    script_args: ScriptArguments,
    source: Source,
    game: Game,
    base_model: tuple[str, PreTrainedTokenizerBase],
    seed: int,
) -> list[Trajectory]:
    """Play the source's episodes as the base model would be asked, and return the successful ones.

    Raises:
        ValueError: if there is none, with what happened in the others.
    """
    name, tokenizer = base_model
    actor = ExpertActor(
        Engine(tokenizer, get_stop_token_ids_of_checkpoint(tokenizer, name)),
        ChatEncoder(tokenizer, game.chat_template_kwargs),
        game.template,
        script_args.history_length,
        expert=source.expert,
        seed=seed,
        **game.prompts,
    )
    with EnvironmentPool(source.factory, game.limits) as pool:
        trajectories, _ = Player(pool, actor, script_args.max_turns).play(source.tasks)
    successes = [t for t in trajectories if t.success]
    reasons = Counter(t.error or t.failure_reason or t.outcome for t in trajectories if not t.success)
    others = "; ".join(f"{number} x {why:.300}" for why, number in reasons.most_common(3))
    if not successes:
        raise ValueError(
            f"none of {len(trajectories)} {source.kind} episodes succeeds ({others}): only successful episodes are "
            "taught. Correct the expert, take easier tasks, or raise demonstration_turns"
        )
    left_out = f"; not taught: {others}" if others else ""
    print(f"{len(successes)} of {len(trajectories)} {source.kind} episodes succeed{printable(left_out)}", flush=True)
    return successes


def draw_rows(trajectories: Sequence[Trajectory], most: int, seed: int, max_length: int | None) -> Dataset:
    """Return samples in random order, as many as have at most `most` actions together, and at least one.

    Raises:
        ValueError: if one is longer than `max_length`.
    """
    rows = build_rows(trajectories)
    random.Random(seed).shuffle(rows)
    actions = list(accumulate(row.pop("actions") for row in rows))
    whole, rows = len(rows), rows[: max(1, bisect_right(actions, most))]
    lengths = [len(row["input_ids"]) for row in rows]
    if max_length is not None and max(lengths) > max_length:
        raise ValueError(f"max_length is {max_length}, and a sample has {max(lengths)} tokens: set it to null")
    limit = "" if len(rows) == whole else f" (of {whole}: num_demonstrations is {most})"
    print(f"samples: {len(rows)}{limit}, with {actions[len(rows) - 1]} actions and {sum(lengths)} tokens", flush=True)
    return Dataset.from_list(rows)


def make_exam(script_args: ScriptArguments, rows: Sequence[dict[str, Any]], game: Game) -> SuccessEvaluation:
    """Return the evaluation that ends teaching."""
    exam = script_args.exam(game.factory, list(islice(cycle(rows), script_args.num_exam_episodes)), game.template)
    stops = tuple(script_args.stop_sequences or ())
    return replace(
        exam,
        sampling=replace(exam.sampling, stop_sequences=stops),
        target_valid=script_args.target_valid,
        prompts=game.prompts,
        chat_template_kwargs=game.chat_template_kwargs,
        limits=game.limits,
    )


def training_defaults(argv: Sequence[str]) -> dict[str, Any]:
    """Return the defaults that the training's configuration file gives: of tasks, model, prompts and output_dir."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--train_config", "--train-config")
    keys = read_config(parser.parse_known_args(argv)[0].train_config)
    shared = {one.name for one in fields(ScriptArguments)} | {"model_name_or_path"}
    defaults = {name: value for name, value in keys.items() if name in shared}
    return {**defaults, "output_dir": f"{keys.get('output_dir', 'runs/model')}-start"}


def main() -> None:
    try:
        defaults = {**read_config(DEFAULT_CONFIG), **training_defaults(sys.argv[1:])}
        script_args, args, model_args = parse_arguments((ScriptArguments, SFTConfig, ModelConfig), defaults=defaults)
        rows, _ = split_tasks(script_args.tasks, script_args.eval_tasks, script_args.num_eval_tasks)
        to_show, to_examine = script_args.split(rows, args.seed)
        game = load_game(script_args)
        showing = replace(script_args, max_turns=script_args.demonstration_turns or script_args.max_turns)
        source = choose_source(showing, to_show, load_game(showing), args.seed)
        with held(args.output_dir, "output_dir"):
            base_model = load_base_model(script_args, args, model_args)
            if script_args.chat_template:
                base_model[1].chat_template = read_chat_template(script_args.chat_template)
            shown = demonstrate(showing, source, game, base_model, args.seed)
            samples = draw_rows(shown, script_args.num_demonstrations, args.seed, args.max_length)
            exam = make_exam(script_args, to_examine, game)
            reached = run_teaching(script_args, args, model_args, base_model, samples, exam)
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(str(error)) from error
    name = (script_args.environment or script_args.agent).removeprefix(f"{Path.cwd()}/")
    target = f"--agent {name}" if script_args.agent else name
    print("With beta above 0, the KL term's reference is this model: TRL loads it from the same folder.")
    following = f"g2po train {target} --model {args.output_dir}"
    if reached:
        print(f"Next: {following}")
    else:
        more = f"--num_train_epochs {MORE * args.num_train_epochs:g}"
        if source.kind == "expert":
            episodes, answers = MORE * len(source.tasks), MORE * script_args.num_demonstrations
            more = f"--num_episodes {episodes} --num_demonstrations {answers}"
        print(
            f"Next: the same command with {more} (it ends at the target). "
            f"Or {following}, if the model sometimes succeeds"
        )


if __name__ == "__main__":
    main()
