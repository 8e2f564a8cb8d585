"""The estimator that a configuration asks for, with its options bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..graph import StateGraph
from .crbc import crbc
from .g2po import g2po
from .gigpo import gigpo
from .graphgpo import graphgpo
from .grpo import grpo
from .hgpo import hgpo
from .rloo import rloo

if TYPE_CHECKING:
    from ...config import G2POConfig


def make_estimator(args: G2POConfig) -> Callable[[StateGraph], np.ndarray]:
    """`StateGraph -> array(num_steps)` by `advantage_estimator` and the options that have a meaning for it."""
    penalty = {"invalid_action_penalty": args.invalid_action_penalty}
    episode = {"scale_by_std": args.scale_by_std, "episode_statistics": args.episode_statistics, **penalty}
    parts = {
        "node_centric": args.use_node_advantage,
        "edge_centric": args.use_edge_advantage,
        "aggregate": args.use_group_aggregation,
    }
    return {
        "g2po": partial(g2po, step_weight=args.step_advantage_weight, **episode, **parts),
        "gigpo": partial(gigpo, step_weight=args.step_advantage_weight, **episode),
        "grpo": partial(grpo, **episode),
        "rloo": partial(rloo, **penalty),
        "graphgpo": partial(graphgpo, step_weight=args.step_advantage_weight, omega=args.graphgpo_omega, **episode),
        "hgpo": partial(
            hgpo,
            scale_by_std=args.scale_by_std,
            history=args.history_length,
            depth_exponent=args.hgpo_depth_exponent,
            **penalty,
        ),
        "crbc": partial(
            crbc,
            step_weight=args.crbc_step_weight,
            gamma=args.crbc_gamma,
            least_std=args.crbc_least_std,
            **episode,
        ),
    }[args.advantage_estimator]


def estimator_name(args: G2POConfig) -> str:
    """The estimator as a table would name it: `g2po`, `g2po without A_EC`, `g2po, value_lambda 0.5`."""
    left_out = {
        "A_NC": args.use_node_advantage,
        "A_EC": args.use_edge_advantage,
        "group aggregation": args.use_group_aggregation,
    }
    missing = [part for part, used in left_out.items() if not used]
    values = f", value_lambda {args.value_lambda}" if args.value_lambda != 1 else ""
    return args.advantage_estimator + (f" without {' and '.join(missing)}" if missing else "") + values
