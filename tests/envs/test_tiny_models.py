"""The bundled tiny models: their files, how they play, and whom they learned from."""

import random
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("alfworld")
pytest.importorskip("textblob")

from g2po_envs.alfworld import demonstrations, games
from g2po_envs.alfworld import tiny as alfworld
from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT
from g2po_envs.sokoban import SOKOBAN_COMPACT_PROMPT, level_rows
from g2po_envs.sokoban import tiny as sokoban
from g2po_envs.sokoban.make_tiny_model import FIRST_LEVEL
from g2po_envs.webshop import ShopSource
from g2po_envs.webshop import demonstrations as shopping
from g2po_envs.webshop import tiny as webshop
from g2po_envs.webshop.make_tiny_model import COURSE, SHOP_SEED
from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.teach.validation import SuccessEvaluation, TeachingArguments

SHOP = ShopSource()


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return games.generate_games(tmp_path_factory.mktemp("games") / "held-out", "held-out", 6, seed=7, size="tiny")


@pytest.mark.parametrize("tiny", [alfworld, sokoban, webshop], ids=lambda tiny: tiny.__name__.split(".")[1])
def test_files_are_small_and_it_plays_undecided(tiny, held_out):
    """Well-formed, sometimes right, with much to learn: where reinforcement learning can begin."""
    files = {path.name: path.stat().st_size for path in tiny.tiny_model_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert files["model.safetensors"] <= 4_000_000
    environment, rows, template, max_turns = {
        alfworld: (partial(alfworld.tiny_environment, held_out), held_out.rows(), ALFWORLD_COMPACT_PROMPT, 15),
        sokoban: (sokoban.tiny_environment, level_rows("small", 32, held_out=True), SOKOBAN_COMPACT_PROMPT, 12),
        webshop: (partial(webshop.tiny_environment, SHOP), SHOP.rows("held-out", 12), COURSE.template, 12),
    }[tiny]
    options = TeachingArguments(max_completion_length=24, history_length=tiny.HISTORY_LENGTH, max_turns=max_turns)
    model = AutoModelForCausalLM.from_pretrained(tiny.tiny_model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny.tiny_model_path())
    with EnvironmentPool(environment, PoolLimits(1)) as pool:
        validation = SuccessEvaluation(environment, rows, template, options)
        summary, _ = validation.evaluate(model, tokenizer, pool, seed=0)
    assert summary["valid_action_ratio"] >= 0.95 and 0.02 < summary["success_rate"] < 0.8, summary


def test_the_experts_succeed(held_out):
    environment = alfworld.tiny_environment(held_out)
    for row in held_out.rows():
        house, now = demonstrations.House.scout(environment, row), environment.reset(**row)
        player = demonstrations.Expert(demonstrations.Goal.from_task(now.task), random.Random(0))
        for _ in range(20):
            action = player.act(house, now.admissible_actions)
            house.apply(action)
            result = environment.step(action)
            now = result.observation
            if result.terminated:
                break
        assert result.info["success"], (row, now)
    shop = webshop.tiny_environment(SHOP)
    for row in SHOP.rows("held-out", 20):
        shop.reset(**row)
        player = shopping.Expert(shop)
        for _ in range(12):
            result = shop.step(player.act())
            if result.terminated:
                break
        assert result.info == {"success": True, "score": 1.0, "score_corrected": 1.0}


def test_what_the_recipes_train_on_was_not_demonstrated():
    shown = {row["number"] for row in level_rows("small", 50, first=FIRST_LEVEL)}
    assert not shown & {row["number"] for row in level_rows("small", 320)}
    shops = [SHOP, *(ShopSource(seed=seed) for seed in range(SHOP_SEED, SHOP_SEED + 3))]
    sold = [{(p.title, p.price_tag) for p in source.load()[0].products.values()} for source in shops]
    assert all(sold[0].isdisjoint(other) for other in sold[1:])
