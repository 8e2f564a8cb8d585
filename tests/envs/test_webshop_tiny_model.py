"""The tiny model that shops: its files, how it plays, and the shopper it learned from."""

import random

import pytest
import torch

pytest.importorskip("textblob")

from functools import partial

from tiny_models import exam_of

from g2po_envs.webshop import ShopSource
from g2po_envs.webshop.demonstrations import Expert, demonstrate, vary
from g2po_envs.webshop.make_tiny_model import COURSE, SHOP_SEED
from g2po_envs.webshop.tiny import HISTORY_LENGTH, tiny_environment, tiny_model_path

SOURCE = ShopSource()


def test_files_are_small_and_safe():
    names = {path.name for path in tiny_model_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert (tiny_model_path() / "model.safetensors").stat().st_size <= 4_000_000


def test_it_shops_undecided():
    """Well-formed, sometimes right, with much to learn: where reinforcement learning can begin."""
    torch.set_num_threads(1)
    environment, rows = partial(tiny_environment, SOURCE), SOURCE.rows("held-out", 48)
    summary = exam_of(tiny_model_path(), environment, rows, COURSE.template, HISTORY_LENGTH, max_turns=12)
    assert summary["valid_action_ratio"] >= 0.95, summary
    assert 0.02 < summary["success_rate"] < 0.8 and summary["score"] > summary["success_rate"], summary


def test_the_expert_buys_what_was_asked_for():
    environment = tiny_environment(SOURCE)
    for row in SOURCE.rows("held-out", 40):
        environment.reset(**row)
        expert = Expert(environment)
        for _ in range(12):
            result = environment.step(expert.act())
            if result.terminated:
                break
        assert result.info == {"success": True, "score": 1.0, "score_corrected": 1.0}


def test_pages_are_varied_without_losing_what_is_right():
    source = ShopSource(seed=SHOP_SEED)
    shown = demonstrate(tiny_environment(source), source.rows("train", 10), seed=0)
    rng, shorter = random.Random(0), 0
    for demonstration in shown:
        other = vary(demonstration, rng)
        assert other.expert in other.actions or other.expert in other.others
        assert (other.task, other.steps_taken) == (demonstration.task, demonstration.steps_taken)
        shorter += len(other.observation) < len(demonstration.observation)
        if other.expert != demonstration.expert:  # the same product, at another place
            old, new = (d.observation[1:-1].split("' [SEP] '") for d in (demonstration, other))
            places = [parts.index(d.expert[6:-1]) for parts, d in ((old, demonstration), (new, other))]
            assert old[places[0] + 1 : places[0] + 3] == new[places[1] + 1 : places[1] + 3]
    assert shorter > 5


def test_training_goals_of_the_recipe_were_not_demonstrated():
    """The demonstrations are from other shops; no product of the recipe's shop is in them."""
    ours = {(p.title, p.price_tag) for p in SOURCE.load()[0].products.values()}
    for seed in range(SHOP_SEED, SHOP_SEED + 3):
        theirs = {(p.title, p.price_tag) for p in ShopSource(seed=seed).load()[0].products.values()}
        assert not ours & theirs
