"""`recipes/train_alfworld.py` by GRPO on the discounted reward gamma^T R, an arm of `learning/comparison.py`.

Takes the same flags. GRPO, unlike the graph estimators, has no reason to prefer short episodes: this is GRPO with one.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is started by its path, as recipes are

from benchmarks.credit.truth import discounted_grpo
from g2po_recipes.train_alfworld import main
from g2po_trl import G2POConfig, G2POTrainer


def make_trainer(args: G2POConfig, **options) -> G2POTrainer:
    """A trainer whose estimator takes the options that GRPO's would."""
    settings = {"scale_by_std": args.scale_by_std, "invalid_action_penalty": args.invalid_action_penalty}
    return G2POTrainer(args=args, advantage_fn=partial(discounted_grpo, **settings), **options)


if __name__ == "__main__":
    main(trainer_class=make_trainer)
