"""PPO with a critic, the actor-critic baseline: `PPOTrainer` and `PPOConfig`.

Rollout, step samples and policy loss are `G2POTrainer`'s; advantages come from a learned value of each prompt instead
of the group's graph. A turn is the unit of time:

    delta_j = r_j + gamma V(s_{j+1}) - V(s_j)          V = 0 after the last turn
    A_j     = delta_j + gamma lambda A_{j+1}           generalised advantage estimation (Schulman et al., 2016)
    R_j     = A_j + V(s_j)                             what the critic learns

An episode that reached `max_turns` is a failure: its last state is not bootstrapped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from accelerate.utils import gather_object

from ..config import G2POConfig
from ..credit.graph import StateGraph
from ..trainer import G2POTrainer
from ..trajectory import Trajectory
from ..update.balance import count_mini_batches
from ..utils.options import option, require
from ..utils.trl_compat import get_config_model_id
from .critic import Critic
from .gae import gae, whiten


@dataclass
class PPOConfig(G2POConfig):
    """Arguments of [`PPOTrainer`]: fields of `G2POConfig` without the estimator's, and fields of the critic.

    The `invalid_action_penalty` is subtracted from the reward of a step whose completion lacks the required format.
    """

    inherited_help: ClassVar[dict[str, str]] = G2POConfig.inherited_help | {
        "scale_rewards": "`'group'`: advantages are whitened over the rollout. `'none'`: they are not scaled."
    }

    advantage_estimator: str = option("PPO has one: `gae`.", "gae", choices=("gae",), group="Advantages")
    gae_lambda: float = option(
        "`lambda` of generalised advantage estimation. 1: discounted return, 0: one-step target.",
        0.95,
        within="[0, 1]",
    )
    critic_model_name_or_path: str | None = option(
        "Model that initialises the critic, with the policy's tokenizer. `None`: the policy's own model.", None
    )
    critic_learning_rate: float | None = option(
        "Constant learning rate of the critic's AdamW. `None`: ten times the policy's.", None, within="(0, inf)"
    )
    critic_epochs: int = option("Number of passes of the critic over the steps of a rollout.", 1, within="[1, inf)")
    critic_mini_batches: int | None = option(
        "Optimizer steps of the critic per epoch. `None`: as many as the policy's.", None, within="[1, inf)"
    )
    value_clip_range: float | None = option(
        "Maximum change of a value in one iteration, in units of reward. `None`: no limit.", 0.5, within="(0, inf)"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.critic_mini_batches is None and self.mini_batch_size is None:
            self.critic_mini_batches = self.steps_per_generation
        if self.critic_learning_rate is None:
            self.critic_learning_rate = 10 * self.learning_rate

    def make_estimator(self) -> None:
        """Return `None`: advantages come from the critic."""

    @property
    def estimator_name(self) -> str:
        return "ppo"

    def _check_estimator(self) -> None:
        for name in self.fields_with("of_graph"):
            value, default = getattr(self, name), getattr(type(self), name)
            require(value == default, name, value, f"PPO's advantages come from its critic; leave it at {default!r}")


class PPOTrainer(G2POTrainer):
    """Proximal policy optimization with a critic, for each step of an episode.

    Arguments are those of `G2POTrainer`, without `advantage_fn`.

    Raises:
        G2POError: for a sharded model (FSDP, DeepSpeed), observations with images, or an `advantage_fn`.
        TypeError: if `args` is not a `PPOConfig`.
    """

    _name = "PPO"

    def __init__(self, model, args: PPOConfig | None = None, *arguments, **kwargs):
        args = args or PPOConfig("ppo-output")
        if not isinstance(args, PPOConfig):
            raise TypeError(f"args is a {type(args).__name__}; PPOTrainer needs a PPOConfig")
        super().__init__(model, args, *arguments, **kwargs)
        require(self.credit.estimator is None, "advantage_fn", self.credit.estimator, "PPO has a critic: leave it out")
        remedy = "every process holds the whole critic: launch it with recipes/accelerate/ddp.yaml, or use G2POTrainer"
        require(not self.is_partitioned, "distributed_type", str(self.accelerator.distributed_type), remedy)
        engine, images = self.player.actor.engine, self.start_check.sample.images
        engine.reads_text_because = "the critic of PPO reads text alone: train with G2POTrainer"
        require(not any(images), "images", images, engine.reads_text_because)
        name = args.critic_model_name_or_path or get_config_model_id(self.model.config)
        remedy = "the model was not loaded from a folder or the Hub: name the model that initialises the critic"
        require(bool(name), "critic_model_name_or_path", name, remedy)
        known = {} if args.critic_model_name_or_path else args.model_init_kwargs or {}
        betas = (args.adam_beta1, args.adam_beta2)
        self.critic = Critic(
            name,
            self.accelerator,
            learning_rate=args.critic_learning_rate,
            max_tokens=args.max_tokens_per_micro_batch,
            max_grad_norm=args.max_grad_norm,
            gradient_checkpointing=args.gradient_checkpointing,
            adamw={"betas": betas, "eps": args.adam_epsilon, "weight_decay": args.weight_decay},
            model_kwargs={key: known[key] for key in ("revision", "variant", "attn_implementation") if key in known},
        )
        self.resumption.kept_in_files.append(self.critic)

    def estimate_advantages(self, graph: StateGraph, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Return the advantages by the critic's values, then fit the critic to the rollout."""
        args, started = self.args, time.perf_counter()
        steps = [step for trajectory in trajectories for step in trajectory.steps]
        rewards = [step.reward - args.invalid_action_penalty * (not step.valid) for step in steps]
        seen = [step.prompt_ids for step in steps]
        rows = gather_object(list(zip(seen, rewards, self.critic.values(seen))))
        rewards, values = (np.array([row[index] for row in rows]) for index in (1, 2))
        used, counted = graph.counted, np.flatnonzero(graph.counted)
        advantages = gae(rewards, values, graph.lengths, args.gamma, args.gae_lambda)
        values, returns = values[counted], (advantages + values)[counted]
        fitted = self.critic.fit(
            [rows[row][0] for row in counted],
            values,
            returns,
            args.value_clip_range,
            args.critic_epochs,
            args.critic_mini_batches or count_mini_batches(len(counted), args.mini_batch_size),
            np.random.default_rng([args.seed, self.iteration.step, 1]),
        )
        spread = returns.var() if len(counted) else 0.0
        fitted |= {"value": values.mean(), "return": returns.mean()} if len(counted) else {"value": 0.0, "return": 0.0}
        fitted["explained_variance"] = 1 - (returns - values).var() / spread if spread > 0 else 0.0
        seconds = {"time/critic": time.perf_counter() - started}
        self.iteration.log({f"critic/{name}": value for name, value in fitted.items()} | seconds)
        return np.where(used, whiten(advantages, used) if args.scale_by_std else advantages, 0.0)
