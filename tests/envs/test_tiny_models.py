"""The bundled tiny models: their files, how they play, whom they learned from, and that they are made alike twice."""

import json
import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("alfworld")
pytest.importorskip("textblob")

from g2po_envs.alfworld import demonstrations, games, make_tiny_model
from g2po_envs.alfworld import tiny as alfworld
from g2po_envs.alfworld.augmentation import ROLES, TYPE_NAMES, augment
from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT
from g2po_envs.sokoban import SIZES, SOKOBAN_COMPACT_PROMPT, expert, level_rows, make_tiny_vision_model
from g2po_envs.sokoban import tiny as sokoban
from g2po_envs.sokoban.make_tiny_model import FIRST_LEVEL
from g2po_envs.tiny.training import Phase, Recipe, teach
from g2po_envs.webshop import ShopSource
from g2po_envs.webshop import demonstrations as shopping
from g2po_envs.webshop import tiny as webshop
from g2po_envs.webshop.make_tiny_model import COURSE, SHOP_SEED
from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.prompts.images import load_processor
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.teach.validation import SuccessEvaluation, TeachingArguments
from g2po_trl.utils.images import as_picture

SHOP = ShopSource()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return games.generate_games(tmp_path_factory.mktemp("games") / "held-out", "held-out", 18, seed=7, size="tiny")


@pytest.mark.parametrize("tiny", [alfworld, sokoban, webshop], ids=lambda tiny: tiny.__name__.split(".")[1])
def test_files_are_small_and_it_plays_undecided(tiny, held_out):
    """Well-formed, sometimes right, with much to learn: where reinforcement learning can begin."""
    files = {path.name: path.stat().st_size for path in tiny.tiny_model_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert files["model.safetensors"] <= 4_000_000
    environment, rows, template, max_turns = {
        alfworld: (partial(alfworld.tiny_environment, held_out), held_out.rows(), ALFWORLD_COMPACT_PROMPT, 15),
        sokoban: (sokoban.tiny_environment, level_rows("small", 64, held_out=True), SOKOBAN_COMPACT_PROMPT, 12),
        webshop: (partial(webshop.tiny_environment, SHOP), SHOP.rows("held-out", 48), COURSE.template, 12),
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
        house = demonstrations.House.scout(environment, row)
        now = environment.reset(**row)
        player = demonstrations.Expert(demonstrations.Goal.from_task(now.task), random.Random(0))
        for _ in range(20):
            action = player.act(house, now.admissible_actions)
            assert action in now.admissible_actions
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


def test_demonstrations_are_varied_without_losing_what_is_right(held_out):
    games_shown = demonstrations.demonstrate(alfworld.tiny_environment(held_out), held_out.rows()[:6], 1, 0)
    for number, shown in enumerate(games_shown):
        other = augment(shown, random.Random(number), keep_names=0.0)
        assert other.expert in other.actions
        words, renamed = (re.findall(r"[a-z]+", d.task + " " + d.observation) for d in (shown, other))
        pairs = set(zip(words, renamed))
        assert len(words) == len(renamed) and len(pairs) == len(dict(pairs))
        assert all(new == old for old, new in pairs if old in ROLES or old not in TYPE_NAMES)
    source, rng = ShopSource(seed=SHOP_SEED), random.Random(0)
    for shown in shopping.demonstrate(webshop.tiny_environment(source), source.rows("train", 10), seed=0):
        other = shopping.vary(shown, rng)
        assert other.expert in other.actions or other.expert in other.others
        assert (other.task, other.steps_taken) == (shown.task, shown.steps_taken)


def test_what_the_recipes_train_on_was_not_demonstrated():
    shown = {row["number"] for row in level_rows("small", 50, first=FIRST_LEVEL)}
    assert not shown & {row["number"] for row in level_rows("small", 320)}
    shops = [SHOP, *(ShopSource(seed=seed) for seed in range(SHOP_SEED, SHOP_SEED + 3))]
    sold = [{(p.title, p.price_tag) for p in source.load()[0].products.values()} for source in shops]
    assert all(sold[0].isdisjoint(other) for other in sold[1:])


def test_making_is_deterministic(tmp_path):
    """The pipeline at a very reduced scale, twice: same tokenizer, same weights; another seed is another model."""
    phases = (Phase("read", 4, 1e-3, whole_sequence=True), Phase("loosen", 3, 1e-3, noise=0.3))
    size = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1}
    recipe = Recipe(**size, batch_size=8, bf16=False, phases=phases)
    made = []
    for attempt in ("once", "again"):
        shown = make_tiny_model.make_demonstrations(tmp_path / attempt, num_games=12)
        model, tokenizer = teach(make_tiny_model.COURSE, shown, make_tiny_model.make_tokenizer, recipe, seed=3)
        made.append((shown, json.dumps(tokenizer.get_vocab(), sort_keys=True), model.state_dict()))
    (shown, vocab, weights), (shown2, vocab2, weights2) = made
    assert shown == shown2 and vocab == vocab2
    assert all(torch.equal(weights[name], weights2[name]) for name in weights)
    short = replace(recipe, phases=recipe.phases[:1])
    other, _ = teach(make_tiny_model.COURSE, shown, make_tiny_model.make_tokenizer, short, seed=4)
    assert not torch.equal(other.state_dict()["model.norm.weight"], weights["model.norm.weight"])


def test_the_model_that_sees_has_a_token_for_each_square_and_is_taught_to_say_what_it_sees(tmp_path):
    processor = make_tiny_vision_model.make_processor()
    for part in (make_tiny_vision_model.build_model(processor.tokenizer), processor):
        part.save_pretrained(tmp_path)
    processor, environment = load_processor(str(tmp_path)), sokoban.drawn_environment()
    seen = environment.reset(number=FIRST_LEVEL)
    encode, picture = ChatEncoder(processor), as_picture(seen.images[0])
    prompt = SOKOBAN_COMPACT_PROMPT.messages("", admissible_actions=seen.admissible_actions, images=[picture])
    squares = encode(prompt)[0].count(processor.image_token_id)
    assert squares == make_tiny_vision_model.SIDE**2 == SIZES["small"].side ** 2
    pixels = processor(text=[processor.image_token], images=[[picture.open()]], return_tensors="pt")["pixel_values"]
    shown = pixels[0, 0].permute(1, 2, 0) * 0.5 + 0.5
    assert (shown * 255).round().byte().numpy().tobytes() == seen.images[0].tobytes(), "no pixel is changed"
    completion = sokoban.describing_expert(environment)
    assert SOKOBAN_COMPACT_PROMPT.read(completion).action == expert(environment)
    words = sokoban.tiny_environment().reset(number=FIRST_LEVEL).text.splitlines()[-1]
    assert f"<think>{words}</think>" in completion
