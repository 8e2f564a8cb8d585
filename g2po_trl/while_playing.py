"""`update_while_playing`: where it can be, and the rollout and the early update side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from .environments.tasks import task_id_of
from .rollout.background import Background
from .rollout.stats import RolloutStats
from .trajectory import Trajectory
from .update.early import EarlyUpdate

if TYPE_CHECKING:
    from .trainer import G2POTrainer

Played = tuple[list[Trajectory], RolloutStats]


class WhilePlaying:
    """Plays in a thread of its own, and updates in this one.

    Args:
        early: the update. trainer: whose `play` plays.
    """

    def __init__(self, early: EarlyUpdate, trainer: G2POTrainer):
        self.early, self.trainer = early, trainer

    def __call__(self, tasks: Sequence[dict[str, Any]], groups: Sequence[int]) -> Played:
        """One trajectory of each task, as `trainer.play`; the gradient of complete groups is computed meanwhile."""
        trainer, device = self.trainer, self.trainer.accelerator.device
        places = [place for place, task in enumerate(tasks) if task_id_of(task) not in trainer.task_errors]
        branching = trainer.branching
        run = lambda on_end: trainer.play(tasks, groups=groups, on_end=on_end, branching=branching)  # noqa: E731
        with Background(run, device) as rollout:

            def ended(wait: bool) -> list[tuple[int, Trajectory]] | None:
                episodes = rollout.ended(wait)
                return None if rollout.is_over else [(places[e.number], e.trajectory()) for e in episodes]

            self.early.learn(ended, groups)
        return rollout.result


def make_while_playing(trainer: G2POTrainer, advantage_fn: Callable | None) -> WhilePlaying | None:
    """As configured; `None` where updates wait for the end of the rollout.

    Args:
        advantage_fn: the user's.

    Raises:
        ValueError: when they should not wait, and have to.
    """
    args = trainer.args
    if args.update_while_playing is False or (args.update_while_playing is None and args.vllm_servers is None):
        return None
    reason = _why_not(trainer, advantage_fn)
    if reason is not None:
        if args.update_while_playing is None:
            return None
        raise ValueError(f"update_while_playing is True, and {reason}, or leave update_while_playing at None")
    early = EarlyUpdate(
        trainer.update,
        trainer.iteration,
        lambda: trainer.accelerator.unwrap_model(trainer.model),
        trainer.ref_model,
        trainer.credit.of_group,
        lambda rows: Trainer.training_step(trainer, early.model, rows, None),
        args.num_generations,
        args.mask_truncated_completions,
    )
    return WhilePlaying(early, trainer)


def _why_not(trainer: G2POTrainer, advantage_fn: Callable | None) -> str | None:
    """What is in the way, and what to do about it."""
    from .trainer import G2POTrainer

    args, engine = trainer.args, trainer.player.actor.engine
    overridden = type(trainer).estimate_advantages is not G2POTrainer.estimate_advantages
    steps = args.steps_per_generation * args.num_iterations
    for is_so, reason in (
        (
            not engine.streams or not engine.takes_seeds,
            f"replies come from {type(engine).__name__}, which computes them with the model that is trained, or for "
            "all ranks together: set vllm_servers, or use_vllm with vllm_mode='colocate' and "
            "vllm_tensor_parallel_size=1",
        ),
        (
            not trainer.player.streams,
            "the rollout does not stream: leave stream_rollouts at None and overlap_environments at False",
        ),
        (
            args.use_vllm and args.vllm_enable_sleep_mode,
            "vllm_enable_sleep_mode is True, so the update needs the memory that vLLM has during a rollout: set "
            "vllm_enable_sleep_mode=False",
        ),
        (
            trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
            "the model is sharded, so all ranks must make as many forward passes at the same time, and each has other "
            "groups that are complete: launch it with recipes/accelerate/ddp.yaml",
        ),
        (
            args.mini_batch_size is not None,
            f"mini_batch_size is {args.mini_batch_size}, so the optimizer makes several steps on a rollout: set "
            "mini_batch_size=None",
        ),
        (
            steps != args.gradient_accumulation_steps,
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps} where an iteration has {steps} "
            "training steps (steps_per_generation x num_iterations), so the optimizer does not make one step an "
            f"iteration: set gradient_accumulation_steps={steps}",
        ),
        (
            args.num_iterations > 1,
            f"num_iterations is {args.num_iterations}: a rollout that is gone through more than once must be "
            "complete. Set num_iterations=1",
        ),
        (
            any(part in str(args.optim).lower() for part in ("layerwise", "lomo")),
            f"optim is {args.optim}, which makes its steps in the backward pass: choose another",
        ),
        (
            args.rollouts_ahead > 0,
            f"rollouts_ahead is {args.rollouts_ahead}: the first groups that are complete make the whole batch, and "
            "none is waited for. Set rollouts_ahead=0",
        ),
        (
            args.refill_groups > 1,
            f"refill_groups is {args.refill_groups}: groups that are complete may be replaced. Set refill_groups=1",
        ),
        (
            args.value_lambda == "auto",
            "value_lambda is 'auto', which is chosen from all groups of a rollout: set value_lambda to a number",
        ),
        (
            args.state_similarity < 1,
            f"state_similarity is {args.state_similarity}: states are merged when all ranks have played. Set "
            "state_similarity=1",
        ),
        (
            advantage_fn is not None or overridden,
            f"advantages come from {trainer.estimator_name}, which gets the graph of all groups and may compare them: "
            "choose an advantage_estimator",
        ),
    ):
        if is_so:
            return reason
    return None
