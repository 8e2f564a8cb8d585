"""Evaluate the tiny model: `python -m g2po_envs.alfworld.tiny_evaluation MODEL --games FOLDER`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from g2po_envs.alfworld.make_tiny_model import COURSE
from g2po_envs.alfworld.manifest import Manifest
from g2po_envs.alfworld.tiny import tiny_environment
from g2po_envs.tiny.commands import evaluate_model


def load_tasks(args: argparse.Namespace):
    """Return the environment factory and rows of a folder's games."""
    games = Manifest.scan(args.games)
    return partial(tiny_environment, games), games.rows()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m g2po_envs.alfworld.tiny_evaluation", description=__doc__)
    parser.add_argument("--games", type=Path, required=True, help="folder of held-out games")
    evaluate_model(parser, COURSE, load_tasks, max_turns=15)
