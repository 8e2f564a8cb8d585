"""Evaluate the tiny model on held-out goals: `python -m g2po_envs.webshop.tiny_evaluation MODEL`."""

from __future__ import annotations

import argparse
from functools import partial

from g2po_envs.tiny.commands import evaluate_model
from g2po_envs.webshop.make_tiny_model import COURSE
from g2po_envs.webshop.source import ShopSource
from g2po_envs.webshop.tiny import tiny_environment


def load_tasks(args: argparse.Namespace):
    """Return the environment and the held-out goals of the default recipe, or of another shop."""
    source = ShopSource(seed=args.shop_seed)
    return partial(tiny_environment, source), source.rows("held-out", 192)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m g2po_envs.webshop.tiny_evaluation", description=__doc__)
    parser.add_argument("--shop_seed", type=int, default=0)
    evaluate_model(parser, COURSE, load_tasks, max_turns=12)
