"""Evaluate a tiny model: `python -m g2po_envs.sokoban.tiny_evaluation FOLDER --size small --levels 192`."""

from __future__ import annotations

import argparse

from g2po_envs.sokoban.environment import SokobanEnvironment
from g2po_envs.sokoban.levels import SIZES, level_rows
from g2po_envs.sokoban.make_tiny_model import COURSE
from g2po_envs.tiny.commands import evaluate_model


def load_tasks(args: argparse.Namespace):
    """Return the environment and held-out levels."""
    return SokobanEnvironment, level_rows(args.size, args.levels, held_out=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--levels", type=int, default=192)
    evaluate_model(parser, COURSE, load_tasks, max_turns=20)
