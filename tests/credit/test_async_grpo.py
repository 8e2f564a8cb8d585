"""docs/frameworks/async_grpo.py in TRL's own rollout loops, with scripted completions, against our own rollout."""

import asyncio
import importlib.util
import multiprocessing
import queue
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from accelerate import PartialState
from openenv.core.harness import ResourceSessionFactory, TrainingTrace, VerifyResult
from scripted_actors import WITH_ACTIONS, ScriptedEngine
from shipped_templates import stop_ids, tokenizer_of
from trl.experimental.async_grpo import async_rollout_worker, openenv_harness

from g2po_trl import EnvironmentPool, EpisodeLimits, Player, PoolLimits, StateGraph, g2po
from g2po_trl.credit import step_advantages
from g2po_trl.engines.base import Completion
from g2po_trl.environments.setup import played_as
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.rollout.actor import PromptActor

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "async_grpo.py"
TASK = {"code": "12", "prompt": [{"role": "user", "content": "Open it. "}]}
EPISODES, TURNS = 6, 3


class Dial:
    """A safe; it pays for the code, and nothing is known of the digit 9."""

    def reset(self, code: str, **row) -> str:
        self.code, self.turned = code, ""
        return "The safe is locked."

    def turn(self, digit: int) -> str:
        """Turn the dial.

        Args:
            digit: where to.
        """
        self.turned += str(digit)
        return "The dial clicks, and something moves inside the door, which is still closed."

    def get_reward(self) -> float | None:
        return None if "9" in self.turned else 10.0 * (self.turned == self.code)


def said(digit=None, text=""):
    """A completion as Qwen 3's template writes it again: TRL renders the conversation for each prompt."""
    call = "" if digit is None else f'<tool_call>\n{{"name": "turn", "arguments": {{"digit": {digit}}}}}\n</tool_call>'
    return f"<think>\n\n</think>\n\n{text}{call}<|im_end|>"


class Script:
    """The n-th completion after a prompt is always the same one; `logprobs` tell completions apart."""

    WORDS = (said(1), said(2), said(text="It is open."), said(1), said(2, "I try.\n"), said(9))

    def __init__(self, tokenizer):
        self.tokenizer, self.asked, self.lock = tokenizer, Counter(), Lock()

    def __call__(self, prompt):
        with self.lock:
            place = self.asked[tuple(prompt)] + 5 * len(prompt)
            self.asked[tuple(prompt)] += 1
        ids = self.tokenizer(self.WORDS[place % len(self.WORDS)], add_special_tokens=False)["input_ids"]
        return ids, [-0.5 - token / 1000 for token in ids]


@pytest.fixture
def tokenizer():
    return tokenizer_of("qwen3")


@pytest.fixture
def page(monkeypatch):
    """The file as a module; what it sets in TRL's modules, it sets in the worker's process."""
    for module in (async_rollout_worker, openenv_harness):
        monkeypatch.setattr(module, "_chain_to_sequences", module._chain_to_sequences)
    spec = importlib.util.spec_from_file_location("async_grpo", PAGE)
    monkeypatch.setitem(sys.modules, "async_grpo", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(sys.modules["async_grpo"])
    return sys.modules["async_grpo"]


def samples_of(loop_class, script, **options):
    """Return what TRL's loop puts into the trainer's queue, of a group."""
    PartialState()  # as in the worker's process; TRL logs
    context = multiprocessing.get_context("spawn")
    loop = loop_class(
        model_name="policy", dataset=[TASK], reward_funcs=[], processing_class=script.tokenizer,
        eos_token_ids=stop_ids(script.tokenizer), rollout_buffer=queue.Queue(), metrics_queue=queue.Queue(),
        model_version_value=context.Value("i", 0), heartbeat_value=context.Value("d", 0.0),
        failed_event=context.Event(), exception_info_queue=queue.Queue(), max_inflight_tasks=EPISODES,
        max_tool_calling_iterations=TURNS - 1, **{"num_generations": EPISODES, **options},
    )  # fmt: skip

    async def generate(prompt_ids):
        return script(prompt_ids)

    async def play():
        done = asyncio.Event()
        score = loop._score_group

        async def counted(group):
            groups.append(await score(group))
            done.set()
            return groups[-1]

        loop._score_group = counted
        await asyncio.gather(loop._generate_loop(stop_event=done), loop._score_loop(stop_event=done))

    groups, loop._generate_one_turn = [], generate
    try:
        loop._loop.run_until_complete(asyncio.wait_for(play(), 60))
    finally:
        loop._tool_pool.shutdown()
        loop._loop.close()
    return groups[0]


def of_samples(samples):
    return Counter(
        (*row.input_ids.tolist(), -1, *row.completion_mask.tolist(), *np.round(row.old_log_probs, 4).tolist())
        + (round(row.advantage, 9),)
        for row in samples
    )


def of_trajectories(trajectories):
    """The same of our own rollout: step samples, and advantages by the graph."""
    graph = StateGraph.from_groups([trajectories], gamma=0.95)
    rows = Counter()
    for step, advantage in zip([step for one in trajectories for step in one.steps], g2po(graph), strict=True):
        context = len(step.prompt_ids)
        mask = [0] * context + [1] * len(step.completion_ids)
        log_probs = np.round(np.float32([0.0] * context + step.logprobs), 4).tolist()
        rows[(*step.prompt_ids, *step.completion_ids, -1, *mask, *log_probs, round(float(advantage), 9))] += 1
    return rows


def test_rows_and_advantages_of_tools_are_those_of_our_own_rollout(page, tokenizer):
    engine, script = ScriptedEngine(tokenizer, None), Script(tokenizer)
    engine.answer = lambda prompts: [Completion(*script(prompt)) for prompt in prompts]
    factory, _, _ = played_as(Dial, EpisodeLimits(TURNS), history="conversation")
    with EnvironmentPool(factory, PoolLimits(1)) as pool:
        actor = PromptActor(engine, ChatEncoder(tokenizer), template=WITH_ACTIONS, history="conversation")
        trajectories, _ = Player(pool, actor, EpisodeLimits(TURNS)).play([TASK] * EPISODES)
    samples = samples_of(page.EnvironmentLoop, Script(tokenizer), environment_factory=Dial)
    counted = [one for one in trajectories if one.counted]
    assert {one.reward for one in counted} == {0.0, 10.0} and len({len(one.steps) for one in counted}) > 1
    assert of_samples([row for row in samples if row.advantage]) == +Counter(
        {row: number for row, number in of_trajectories(counted).items() if row[-1]}
    )
    assert len({row.group_id for row in samples}) == 1


class Session:
    """An agent that ran and rewrote its history: its requests as OpenEnv captures them, and what it got."""

    def __init__(self, episode, tokenizer):
        self.reward, self.turns = [1.0, 0.0, None, 0.0][episode], []
        for turn, place in enumerate(["hall", ["cellar", "attic"][episode % 2]]):
            text = f"You came from elsewhere, {turn} doors ago. You are in the {place} of a large house by the sea."
            prompt, answer = (tokenizer(words)["input_ids"] for words in (text, f"go {episode}"))
            message, is_context = {"role": "assistant", "content": f"go {episode}"}, (episode, turn) == (1, 1)
            entry = {"metadata": {"node_id": f"{episode}-{turn}"}, "response": {"choices": [{"message": message}]}}
            entry |= {"request": {"messages": [{"role": "user", "content": text}]}, "prompt_token_ids": prompt}
            entry |= {"completion_token_ids": answer, "per_token_logps": [-1.0] * len(answer)}
            self.turns.append(entry | {"loss_mask": [0] * len(prompt) + [int(not is_context)] * len(answer)})
        self.wait_for_completion, self.close = lambda timeout_s=None: 0, lambda: None

    def fetch_training_trace(self):
        return TrainingTrace.from_entries(self.turns)

    def verify(self, transcript, final_state=None):
        return VerifyResult(self.reward)


class Sessions(ResourceSessionFactory):
    def __init__(self, tokenizer, sampling):
        self.tokenizer, self.made, self.lock = tokenizer, Counter(), Lock()

    def create(self, task, seed=None, episode_id=None):
        with self.lock:
            self.made[seed] += 1  # of a group
            return Session(self.made[seed] - 1, self.tokenizer)


def test_rows_and_advantages_of_an_unmodified_agent(page, tokenizer):
    """Its second completion is context in one episode, and one episode has no result."""
    sessions = partial(Sessions, tokenizer)
    samples = samples_of(page.HarnessLoop, Script(tokenizer), num_generations=4, harness_session_factory=sessions)
    made = [Session(episode, tokenizer) for episode in range(4)]
    states = [["hall", place] for place in ("cellar", "attic", "cellar", "attic")]
    advantages = step_advantages(states, [one.reward for one in made], [0] * 4)
    expected = {
        (*turn["prompt_token_ids"], *turn["completion_token_ids"], -1, *turn["loss_mask"]): advantage
        for one, credit in zip(made, advantages)
        for turn, advantage in zip(one.turns, credit)
        if any(turn["loss_mask"])
    }
    rows = {(*row.input_ids.tolist(), -1, *row.completion_mask.tolist()): row for row in samples}
    assert len(samples) == len(expected) == 7
    assert {row: sample.advantage for row, sample in rows.items()} == pytest.approx(expected)
    assert all((row.old_log_probs == -row.completion_mask).all() for row in samples)
