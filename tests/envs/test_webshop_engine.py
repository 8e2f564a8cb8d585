"""The shop against recordings of the official engine (real Lucene): search, goals, rewards, pages of 212 visits."""

import gzip
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("thefuzz")
pytest.importorskip("snowballstemmer")

from g2po_envs.webshop import Catalogue, Goal, Shop, human_goals, synthetic_goals
from g2po_envs.webshop.reward import score
from g2po_envs.webshop.search import analyse

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "webshop"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the recordings are not here (../shared/golden/webshop)")
OFFICIAL_SEED = 233


def read(name):
    path = GOLDEN / name
    text = gzip.open(path, "rt").read() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()] if ".jsonl" in name else json.loads(text)


def load(goals_of):
    """Catalogue and goals as recorded: one random stream for prices and limits, then a seeded shuffle."""
    rng = random.Random(OFFICIAL_SEED)
    files = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")
    catalogue = Catalogue.load(*(GOLDEN / name for name in files), rng=rng)
    goals = goals_of(catalogue, rng)
    random.Random(OFFICIAL_SEED).shuffle(goals)
    return catalogue, goals


@pytest.fixture(scope="module")
def recorded():
    return {False: load(synthetic_goals), True: load(human_goals)}


@pytest.fixture(scope="module")
def nouns():
    return read("nouns.json")["titles"].__getitem__


def goal_of(record, weight=1.0):
    options = record["goal_options"]
    names = ("asin", "category", "query", "name", "product_category", "instruction_text")
    facts = [record[name] for name in names]
    options = options if isinstance(options, dict) else tuple(options)
    return Goal(*facts, tuple(record["attributes"]), record["price_upper"], options, weight)


@pytest.mark.parametrize("human", [False, True])
def test_goals_are_the_recorded_ones(recorded, human):
    goals, expected = recorded[human][1], read("goals.json")["human" if human else "synthetic"]
    assert len(goals) == len(expected) > 250
    for goal, record in zip(goals, expected):
        assert goal.weight == pytest.approx(record["weight"])
        assert goal == goal_of(record, goal.weight)


def test_words_are_lucenes(recorded):
    analysis = read("analysis.json.gz")
    assert {asin: p.contents for asin, p in recorded[False][0].products.items()} == analysis["contents"]
    for asin, text in analysis["contents"].items():
        assert analyse(text) == analysis["doc_tokens"][asin]
    for query, terms in analysis["query_tokens"].items():
        assert analyse(query) == terms


def test_searches_are_ranked_as_by_lucene(recorded):
    index = recorded[False][0].index
    rows = read("searches.json")
    assert len(rows) == 340
    assert [row["id"] for row in rows if index.search(row["query"]) != row["asins"]] == []


def test_rewards_and_their_parts(recorded, nouns):
    products, rows = recorded[False][0].products, read("rewards.jsonl")
    assert len(rows) == 500
    for row in rows:
        value, parts = score(products[row["asin"]], goal_of(row["goal"]), row["price"], row["options"], nouns)
        assert value == row["reward"] and parts == row["info"], row["id"]


def test_every_page_of_every_recorded_visit(recorded, nouns):
    episodes, steps = read("episodes.jsonl.gz"), 0
    for episode in episodes:
        catalogue, goals = recorded[episode["human_goals"]]
        name = episode["goal_index"]
        shop = Shop(catalogue, goals[name], nouns, episode["show_attrs"], str(name))
        for number, step in enumerate(episode["steps"]):
            outcome = shop.act(step["action"]) if step["action"] is not None else None
            place = f"episode {episode['id']} ({episode['cls']}), step {number}, {step['action']!r}"
            shown = {"obs": shop.text, "obs_rich": shop.rich, "clickables": shop.clickables}
            shown["has_search_bar"] = shop.has_search_bar
            assert shown == {name: step[name] for name in shown}, place
            if outcome is not None:
                assert (outcome.reward, outcome.done) == (step["reward"], step["done"]), place
            steps += 1
        if episode["bought"]:
            assert {key: shop.purchase[key] for key in ("asin", "options")} == episode["bought"]
    assert (len(episodes), steps) == (212, 1919)


def test_actions_that_break_the_official_engine_do_not_break_ours(recorded, nouns):
    catalogue, goals = recorded[False]
    for row in read("engine_errors.json"):
        shop = Shop(catalogue, goals[0], nouns)
        for action in row["before"]:
            shop.act(action)
        shop.act(row["action"])
        assert shop.text


def test_products_are_read_as_officially(recorded):
    products, expected = recorded[False][0].products, read("prices.json")
    assert {asin: p.price for asin, p in products.items()} == expected["prices"]
    assert {asin: p.price_tag for asin, p in products.items()} == expected["price_tag"]
    assert {asin: {k: list(v) for k, v in p.options.items()} for asin, p in products.items()} == expected["options"]
