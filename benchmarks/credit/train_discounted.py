"""`g2po train alfworld` by GRPO on the discounted reward gamma^T R, an arm of `learning/comparison.py`.

Takes the same flags. GRPO, unlike the graph estimators, has no reason to prefer short episodes: this is GRPO with one.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is started by its path, as a user's script is

from benchmarks.credit.truth import discounted_grpo
from benchmarks.train import run


def discount(given: dict) -> None:
    """Give the trainer an estimator with the options that GRPO's would have."""
    args = given["args"]
    options = {"scale_by_std": args.scale_by_std, "invalid_action_penalty": args.invalid_action_penalty}
    given["advantage_fn"] = partial(discounted_grpo, **options)


def main() -> None:
    run(["alfworld", *sys.argv[1:]], discount)


if __name__ == "__main__":
    main()
