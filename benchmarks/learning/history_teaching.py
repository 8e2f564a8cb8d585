"""Teaching of the bundled model for the comparison of histories: one course of demonstrations, in either form.

Walks of the bundled model's own course (a careless walker, an expert who does not know the tools) pass through the
rollout's own code, a `PromptActor` whose engine "samples" what the walker did. So each demonstration is, to the token,
what a rollout shows. Trained are the turns in which the walker did what the expert says: the same turns of the same
walks, in the same optimizer steps, for either form.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT
from g2po_envs.alfworld.augmentation import Renaming
from g2po_envs.alfworld.demonstrations import LimitedExpert, demonstrate
from g2po_envs.alfworld.manifest import Manifest
from g2po_envs.alfworld.tiny import HISTORY_LENGTH, tiny_environment, tiny_model_path
from g2po_envs.tiny.demonstration import Demonstration
from g2po_envs.tiny.training import COMPLETION
from g2po_trl.engines.base import Completion, Engine
from g2po_trl.engines.sampling import Sampling
from g2po_trl.environments.contract import Observation, StepResult
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.rollout.episode import Episode
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.trajectory import Step

HISTORIES = ("window", "conversation")
CONTEXT = 4096  # of the model: 15 turns of a conversation have at most half of it
MAX_TURNS = 15
KEEP_NAMES = 0.3  # as in `g2po_envs.alfworld.augmentation.augment`

Walk = list[tuple[Demonstration, str]]  # states, each with the action that was played there
Row = tuple[list[int], list[int]]  # input ids, labels


def demonstrations_on(games: Manifest, episodes: int, seed: int) -> list[Demonstration]:
    """Return states of `episodes` walks on each game, as in the bundled model's course, with all earlier steps."""
    course = {"expert_class": LimitedExpert, "carelessness": (0.3, 0.5, 0.7), "impossible": 0.1}
    tasks, environment = games.rows(), tiny_environment(games)
    return demonstrate(environment, tasks, episodes, seed, MAX_TURNS, history_length=MAX_TURNS, **course)


def walks_of(shown: Sequence[Demonstration]) -> list[Walk]:
    """Return the walks of demonstrations; in the last state of each, what the expert says counts as played."""
    walks: list[Walk] = []
    for one, then in zip(shown, [*shown[1:], None]):
        if one.steps_taken == 0:
            walks.append([])
        goes_on = then is not None and then.steps_taken > 0
        walks[-1].append((one, then.history[-1][1] if goes_on else one.expert))
    return walks


def vary(walk: Walk, rng: random.Random) -> Walk:
    """Return the walk with names exchanged, except in a share of cases, and with the actions in another order."""
    rename = (lambda text: text) if rng.random() < KEEP_NAMES else Renaming(rng)

    def varied(one: Demonstration) -> Demonstration:
        actions = [rename(action) for action in one.actions]
        rng.shuffle(actions)
        task, seen = rename(one.task), rename(one.observation)
        return replace(one, task=task, observation=seen, actions=actions, expert=rename(one.expert), history=())

    return [(varied(one), rename(played)) for one, played in walk]


class Script(Engine):
    """An engine whose next completion is given."""

    completion: list[int]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        return [Completion(self.completion) for _ in prompts]


def make_actor(tokenizer: PreTrainedTokenizerBase, history: str) -> PromptActor:
    """Return the rollout's actor, whose engine is a `Script`."""
    engine = Script(tokenizer, [tokenizer.eos_token_id])
    return PromptActor(engine, ChatEncoder(tokenizer), ALFWORLD_COMPACT_PROMPT, HISTORY_LENGTH, history=history)


def steps_of(actor: PromptActor, walk: Walk) -> list[Step]:
    """Return the steps that a rollout records if the model writes what the walker did."""
    session = actor.session(Sampling(), None, RolloutStats())
    seen = [Observation(one.observation, None, one.actions, one.task) for one, _ in walk]
    episode = Episode("walk")
    episode.open(seen[0])
    for (_, played), then in zip(walk, [*seen[1:], seen[-1]]):
        text = COMPLETION.format(action=played)
        actor.engine.completion = actor.engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        session.ask([episode])
        ((_, step),) = session.receive_steps(0)
        episode.steps.append(step)
        episode.advance(StepResult(then))
    return episode.steps


def rows_of(actor: PromptActor, walk: Walk) -> list[Row]:
    """Return training rows: in a window one per trained turn, of a conversation one.

    Raises:
        AssertionError: if a conversation's prompt does not begin with the earlier ones and their completions.
    """
    steps = steps_of(actor, walk)
    trained = [step for step, (one, played) in zip(steps, walk) if played == one.expert]
    if actor.history == "window":
        return [(s.prompt_ids + s.completion_ids, [-100] * len(s.prompt_ids) + s.completion_ids) for s in trained]
    if not trained:
        return []
    ids = [*trained[-1].prompt_ids, *trained[-1].completion_ids]
    labels = [-100] * len(ids)
    for step in trained:
        start, end = len(step.prompt_ids), len(step.prompt_ids) + len(step.completion_ids)
        assert ids[:end] == [*step.prompt_ids, *step.completion_ids]
        labels[start:end] = step.completion_ids
    return [(ids, labels)]


def batches(walks: Sequence[Walk], size: int, seed: int) -> Iterator[list[Walk]]:
    """Yield batches of varied walks endlessly; the same ones whatever the form."""
    rng, deck = random.Random(f"history-{seed}"), []
    while True:
        batch = []
        while len(batch) < size:
            if not deck:
                deck = rng.sample(walks, len(walks))
            batch.append(vary(deck.pop(), rng))
        yield batch


def load_start(folder: str | None = None) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """Return a model, the bundled one by default, and its tokenizer, with room for whole conversations."""
    folder = folder or str(tiny_model_path())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.config.max_position_embeddings = tokenizer.model_max_length = CONTEXT
    return model, tokenizer


@dataclass
class Course:
    """Batches of walks, and the optimizer's settings (AdamW, cosine, warm-up of a tenth)."""

    walks: Sequence[Walk]
    steps: int = 400
    walks_per_step: int = 8
    learning_rate: float = 1e-3
    seed: int = 0


def teach(course: Course, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, history: str) -> dict[str, Any]:
    """Train a model on a course and return what it was shown, with the losses of each tenth."""
    actor, begun = make_actor(tokenizer, history), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=course.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = max(1, course.steps // 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm_up, 1.0, warm_up),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, course.steps - warm_up)),
        ],
        [warm_up],
    )
    shown = {"actions": 0, "tokens": 0, "longest row": 0}
    losses: list[float] = []
    model.train()
    for step, batch in zip(range(course.steps), batches(course.walks, course.walks_per_step, course.seed)):
        rows = [row for walk in batch for row in rows_of(actor, walk)]
        loss = loss_of(model, rows, tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        shown["actions"] += sum(label == tokenizer.eos_token_id for _, labels in rows for label in labels)
        shown["tokens"] += sum(len(ids) for ids, _ in rows)
        shown["longest row"] = max([shown["longest row"], *(len(ids) for ids, _ in rows)])
        if (step + 1) % max(1, course.steps // 10) == 0:
            recent = losses[-max(1, course.steps // 10) :]
            seconds = time.perf_counter() - begun
            print(f"{step + 1:5} steps  loss {sum(recent) / len(recent):.3f}  {seconds:.0f} s", flush=True)
    tenth = max(1, len(losses) // 10)
    return {
        "seed": course.seed,
        "steps": course.steps,
        "walks_per_step": course.walks_per_step,
        "learning_rate": course.learning_rate,
        **shown,
        "losses": [round(sum(part) / len(part), 4) for part in zip(*[iter(losses)] * tenth)],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def loss_of(model: torch.nn.Module, rows: Sequence[Row], pad: int) -> torch.Tensor:
    """Return the mean cross-entropy of the labels."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in rows])
    lengths = torch.tensor([len(row) for row, _ in rows])
    mask = (torch.arange(width) < lengths[:, None]).long()
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
    predicts = labels[:, 1:] != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[predicts]), labels[:, 1:][predicts])
