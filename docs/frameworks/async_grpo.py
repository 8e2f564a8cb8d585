"""Step credit in TRL's `AsyncGRPOTrainer`: one row per step, with the advantage from its group's graph. TRL 1.16.

TRL makes a row of each conversation and gives all of its tokens the conversation's advantage. Here each completion is
a row of its own, after the prompt that the model read. Tokens that prompts share are computed once, since TRL lays out
the rows of a group as a trie (`packing.TreeRow`).

    from async_grpo import GraphRolloutWorker

    GraphRolloutWorker.use()  # before the trainer is made
    trainer = AsyncGRPOTrainer(model, args=args, train_dataset=tasks, environment_factory=MyEnvironment)
    trainer.train()

For an unmodified agent, pass `rollout_worker=GraphHarnessWorker(…)`, which takes the arguments of TRL's
`HarnessRolloutWorker`. Rewards come from `reward_funcs`, `get_reward` or the harness, as without this file.

What differs from `G2POTrainer`: there is no KL term and no penalty for invalid calls, and samples may be of an earlier
policy. `per_device_train_batch_size` counts steps, and the rewards that TRL logs are means over steps.

TRL 1.18 moves the modules, and its trainer no longer takes `rollout_worker` and `weight_transfer`; `use` needs
neither.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo.async_rollout_worker import TrainingSequence, TurnRecord

from g2po_trl.credit import step_advantages
from g2po_trl.prompts.conversation import normalize_messages
from g2po_trl.prompts.state_keys import request_key

try:
    from trl.experimental.async_grpo import openenv_harness as trl_harness
except ImportError:  # OpenEnv is not installed
    trl_harness = None

Messages = Sequence[dict[str, Any]]
chain_of_trl = trl_worker._chain_to_sequences


def one_row_per_step(turns: Sequence[TurnRecord], rollout_id: str, fork_threshold: int) -> tuple[list, dict]:
    """Return a row for each turn of a conversation, in place of TRL's function, and that function's metrics."""
    rows = []
    for turn in turns:
        mask = [1] * len(turn.output_ids) if turn.output_mask is None else turn.output_mask
        context = len(turn.prompt_ids)
        log_probs = [0.0] * context + list(turn.output_log_probs)
        tokens = [*turn.prompt_ids, *turn.output_ids]
        rows.append(TrainingSequence(tokens, [0] * context + list(mask), log_probs, rollout_id))
    return rows, chain_of_trl(turns, rollout_id, fork_threshold)[1]


class StepCredit:
    """Give each step a row and an advantage, in a rollout loop of TRL. Subclasses may choose other options.

    `state_key` is a function of a request's messages; `estimator` and `gamma` are arguments of `step_advantages`.
    """

    state_key: Callable[[Messages], str] = staticmethod(request_key)
    estimator: Callable | str = "g2po"
    gamma = 0.95

    def __init__(self, **options: Any):
        for module in filter(None, (trl_worker, trl_harness)):  # of the worker's own process
            module._chain_to_sequences = one_row_per_step
        super().__init__(**options)
        self._keys: dict[str, list[str]] = {}  # of each conversation that is not scored yet: the states of its steps

    async def _score_group(self, group: Any) -> list[Any]:
        """Return TRL's samples, with an advantage for each step."""
        samples = iter(await super()._score_group(group))
        episodes = [[next(samples) for _ in rows] for rows in group.completions_sequences]
        keys = [self._keys.pop(rows[0].rollout_id) if rows else [] for rows in group.completions_sequences]
        # NaN: no function knows a reward. The episode is compared with none, and its advantages are 0, as in TRL.
        totals = [steps[0].metrics["reward"] if steps else float("nan") for steps in episodes]
        advantages = step_advantages(
            keys,
            [None if isnan(total) else total for total in totals],
            [group.group_id] * len(keys),
            estimator=self.estimator,
            gamma=self.gamma,
        )
        return [
            replace(step, advantage=float(advantage))
            for steps, of_steps in zip(episodes, advantages, strict=True)
            for step, advantage in zip(steps, of_steps, strict=True)
            if step.completion_mask.any()  # a harness may leave out completions that it could not reconcile
        ]

    def note_states(self, rows: Sequence[TrainingSequence], messages: Messages, requests: Sequence[Messages] = ()):
        """Store the states of a conversation: of its steps' requests, or of the messages before its last answers."""
        if rows:
            answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            requests = requests or [messages[:place] for place in answers[-len(rows) :]]
            self._keys[rows[0].rollout_id] = [self.state_key(normalize_messages(one)) for one in requests]


class EnvironmentLoop(StepCredit, trl_worker._AsyncRolloutLoop):
    """Play environments with tool methods (`environment_factory`), or functions (`tools`)."""

    async def _generate_one(self, prompt, *args, **kwargs):
        result = await super()._generate_one(prompt, *args, **kwargs)
        self.note_states(result[2], [*prompt, *result[0]])
        return result


class GraphRolloutWorker(trl_worker.AsyncRolloutWorker):
    """TRL's worker, with step credit."""

    _loop_cls = EnvironmentLoop

    @classmethod
    def use(cls) -> None:
        """Let each `AsyncGRPOTrainer` that makes its own worker run this class's loop."""
        trl_worker.AsyncRolloutWorker._loop_cls = cls._loop_cls


if trl_harness is not None:

    class HarnessLoop(StepCredit, trl_harness._HarnessRolloutLoop):
        """Run agents that call the model themselves, in sessions of OpenEnv."""

        def __init__(self, *, rollout_reward_fn: Callable | None = None, **options: Any):
            super().__init__(rollout_reward_fn=self._reward, **options)
            self._own_reward, self._session = rollout_reward_fn, threading.local()

        def _reward(self, outcome: Any) -> float | None:
            self._session.requests = [entry["request"]["messages"] for entry in outcome.trace]
            return self._own_reward(outcome) if self._own_reward else outcome.env_reward

        def _run_session(self, *args, **kwargs):  # a session stays in its thread
            result, metrics = super()._run_session(*args, **kwargs)
            self.note_states(result[2], result[0], self._session.requests if result[2] else ())
            return result, metrics

    class GraphHarnessWorker(trl_harness.HarnessRolloutWorker):
        """TRL's worker for a harness, with step credit."""

        _loop_cls = HarnessLoop
