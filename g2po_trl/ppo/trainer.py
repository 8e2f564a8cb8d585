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
from typing import Any, ClassVar

import numpy as np
from accelerate.utils import gather_object

from ..config import G2POConfig
from ..credit.graph import StateGraph
from ..trainer import G2POTrainer
from ..trajectory import Trajectory
from ..update.balance import count_mini_batches
from ..utils.errors import G2POError
from ..utils.options import option, require
from ..utils.trl_compat import get_config_model_id
from .critic import Critic
from .gae import gae, whiten


@dataclass
class PPOConfig(G2POConfig):
    """Arguments of [`PPOTrainer`]: fields of `G2POConfig` without the estimator's, and fields of the critic.

    `scale_rewards="group"` whitens advantages over the rollout, `"none"` does not scale them. The
    `invalid_action_penalty` is subtracted from the reward of a step whose completion lacks the required format.
    """

    inherited_help: ClassVar[dict[str, str]] = G2POConfig.inherited_help | {
        "scale_rewards": "`'group'`: advantages are whitened over the rollout. `'none'`: they are not scaled."
    }

    advantage_estimator: str = option("PPO has one: `gae`.", "gae", choices=("gae",), group="Advantages")
    gae_lambda: float = option(
        "`lambda` of generalised advantage estimation: 1 uses the discounted return, 0 the one-step target.",
        0.95,
        within="[0, 1]",
    )
    critic_model_name_or_path: str | None = option(
        "Model that initialises the critic. A smaller one saves memory; its tokenizer must be the policy's. `None`: "
        "the policy's own model.",
        None,
    )
    critic_learning_rate: float | None = option(
        "Constant learning rate of the critic's AdamW. `None`: ten times the policy's, as in the paper.",
        None,
        within="(0, inf)",
    )
    critic_epochs: int = option("Number of passes of the critic over the steps of a rollout.", 1, within="[1, inf)")
    critic_mini_batches: int | None = option(
        "Optimizer steps of the critic per epoch. `None`: as many as the policy's, which `mini_batch_size` or "
        "`steps_per_generation` sets.",
        None,
        within="[1, inf)",
    )
    value_clip_range: float | None = option(
        "Maximum change of a value in one iteration, in units of reward (see `Critic.fit`). `None`: no limit.",
        0.5,
        within="(0, inf)",
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
        G2POError: if the model is sharded (FSDP, DeepSpeed), since every process holds the whole critic, or an
            `advantage_fn` is passed.
        TypeError: if `args` is not a `PPOConfig`.
    """

    _name = "PPO"

    def __init__(self, model, args: PPOConfig | None = None, *arguments, **kwargs):
        args = args or PPOConfig("ppo-output")
        if not isinstance(args, PPOConfig):
            raise TypeError(f"args is a {type(args).__name__}; PPOTrainer needs a PPOConfig")
        super().__init__(model, args, *arguments, **kwargs)
        remedy = "PPO's advantages come from its critic; leave it out"
        require(self.credit.estimator is None, "advantage_fn", self.credit.estimator, remedy)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise G2POError(
                "PPOTrainer runs on one process or under DDP: every process holds the whole critic. Launch it with "
                "recipes/accelerate/ddp.yaml, or train with G2POTrainer, which needs no critic."
            )
        self.player.actor.engine.reads_text_because = "the critic of PPO reads text alone: train with G2POTrainer"
        if self.start_check.sample.images is not None:
            raise G2POError(f"observations have images, and {self.player.actor.engine.reads_text_because}")
        name = args.critic_model_name_or_path or get_config_model_id(self.model.config)
        if not name:
            raise G2POError(
                "critic_model_name_or_path is None and the model was not loaded from a folder or the Hub: set it to "
                "the model that initialises the critic"
            )
        self.critic = Critic(
            name,
            self.accelerator,
            learning_rate=args.critic_learning_rate,
            max_tokens=args.max_tokens_per_micro_batch,
            max_grad_norm=args.max_grad_norm,
            gradient_checkpointing=args.gradient_checkpointing,
            adamw={
                "betas": (args.adam_beta1, args.adam_beta2),
                "eps": args.adam_epsilon,
                "weight_decay": args.weight_decay,
            },
            model_kwargs={
                name: value
                for name, value in (args.model_init_kwargs or {}).items()
                if name in ("revision", "attn_implementation") and not args.critic_model_name_or_path
            },
        )
        self.resumption.kept_in_files.append(self.critic)

    def estimate_advantages(self, graph: StateGraph, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Return the advantages by the critic's values, then fit the critic to the rollout."""
        args, started = self.args, time.perf_counter()
        steps = [step for trajectory in trajectories for step in trajectory.steps]
        prompts = [step.prompt_ids for step in steps]
        rewards = [step.reward - args.invalid_action_penalty * (not step.valid) for step in steps]
        ranks = gather_object([(prompts, rewards, self.critic.values(prompts))])
        prompts = [prompt for rank_prompts, _, _ in ranks for prompt in rank_prompts]
        rewards = np.array([reward for _, rank_rewards, _ in ranks for reward in rank_rewards])
        values = np.concatenate([rank_values for _, _, rank_values in ranks])

        used = graph.counted
        advantages = gae(rewards, values, graph.lengths, args.gamma, args.gae_lambda)
        returns = advantages + values
        counted = np.flatnonzero(used)
        fitted = self.critic.fit(
            [prompts[row] for row in counted],
            values[counted],
            returns[counted],
            args.value_clip_range,
            args.critic_epochs,
            args.critic_mini_batches or count_mini_batches(len(counted), args.mini_batch_size),
            np.random.default_rng([args.seed, self.iteration.step, 1]),
        )
        self._log_critic(fitted, values[counted], returns[counted], time.perf_counter() - started)
        if args.scale_by_std:
            advantages = whiten(advantages, used)
        return np.where(used, advantages, 0.0)

    def _log_critic(self, fitted: dict[str, float], values: np.ndarray, returns: np.ndarray, seconds: float) -> None:
        spread = returns.var() if len(returns) else 0.0
        logged: dict[str, Any] = {f"critic/{name}": value for name, value in fitted.items()}
        logged |= {
            "critic/value": values.mean() if len(values) else 0.0,
            "critic/return": returns.mean() if len(returns) else 0.0,
            "critic/explained_variance": 1 - (returns - values).var() / spread if spread > 0 else 0.0,
            "time/critic": seconds,
        }
        self.iteration.log(logged)
