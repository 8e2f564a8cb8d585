"""The shop against recordings of the official engine (real Lucene): search, goals, rewards, pages of 212 visits."""

import gzip
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("thefuzz")
pytest.importorskip("snowballstemmer")

from refusals import refused

from g2po_envs.webshop import Catalogue, Goal, Shop, human_goals, synthetic_goals
from g2po_envs.webshop.reward import score
from g2po_envs.webshop.search import SearchIndex, analyse
from g2po_envs.webshop.words import split_words

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "webshop"
needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="the recordings are not here (../shared/golden/webshop)")
OFFICIAL_SEED = 233
ITEMS = '[{"asin": "B000000001"}]'


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


@needs_golden
@pytest.mark.parametrize("human", [False, True])
def test_goals_are_the_recorded_ones(recorded, human):
    goals, expected = recorded[human][1], read("goals.json")["human" if human else "synthetic"]
    assert len(goals) == len(expected) > 250
    for goal, record in zip(goals, expected):
        assert goal.weight == pytest.approx(record["weight"])
        assert goal == goal_of(record, goal.weight)


@needs_golden
def test_words_are_lucenes(recorded):
    analysis = read("analysis.json.gz")
    assert {asin: p.contents for asin, p in recorded[False][0].products.items()} == analysis["contents"]
    for asin, text in analysis["contents"].items():
        assert analyse(text) == analysis["doc_tokens"][asin]
    for query, terms in analysis["query_tokens"].items():
        assert analyse(query) == terms


@needs_golden
def test_searches_are_ranked_as_by_lucene(recorded):
    index = recorded[False][0].index
    rows = read("searches.json")
    assert len(rows) == 340
    assert [row["id"] for row in rows if index.search(row["query"]) != row["asins"]] == []


@needs_golden
def test_rewards_and_their_parts(recorded, nouns):
    products, rows = recorded[False][0].products, read("rewards.jsonl")
    assert len(rows) == 500
    for row in rows:
        value, parts = score(products[row["asin"]], goal_of(row["goal"]), row["price"], row["options"], nouns)
        assert value == row["reward"] and parts == row["info"], row["id"]


@needs_golden
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


@needs_golden
def test_actions_that_break_the_official_engine_do_not_break_ours(recorded, nouns):
    catalogue, goals = recorded[False]
    for row in read("engine_errors.json"):
        shop = Shop(catalogue, goals[0], nouns)
        for action in row["before"]:
            shop.act(action)
        shop.act(row["action"])
        assert shop.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("กาแฟดำ 250g", "กาแฟดำ 250g"),  # scripts without spaces (line-break class SA): a run is one word: Thai,
        ("🇫🇷🇩🇪", "🇫🇷 🇩🇪"),  # two regional indicators are a flag,
        ("henry ⅷ, xⅷ, ⓐ", "henry ⅷ xⅷ ⓐ"),  # alphabetic though no letters: word-break class ALetter
        ("1½ ½ m² x²y ① ⑴", "1 m x y"),  # other numbers have no word-break class: they end a word and are dropped
        ("１２ ٣٤ 3.5mm 10:30", "１２ ٣٤ 3.5mm 10 30"),  # digits of every script; a full stop joins them, a colon not
        ("usbケーブル ﾃｽﾄ", "usb ケーブル ﾃｽﾄ"),  # katakana is a run of its own, of half width too
        ("紅茶 おちゃ 한국어a", "紅 茶 お ち ゃ 한국어a"),  # ideographs and hiragana one by one; Hangul is letters
        ('צה"ל ג\' abc\' "x"', "צה\"ל ג' abc x"),  # quotation marks belong to Hebrew words, to no others
        ("👩‍💻👍🏽❤️ #️⃣ # ★☆", "👩‍💻 👍🏽 ❤️ #️⃣ ★"),  # an emoji with all that modifies it; ☆ is no pictograph
        ("b" * 300, f"{'b' * 255} {'b' * 45}"),  # 255 characters at most
    ],
)
def test_words_by_hand(text, words):
    """As the grammar of Lucene 8's StandardTokenizer says; its recordings have few such characters."""
    assert list(split_words(text)) == words.split(" ")


def test_bm25_by_hand():
    index = SearchIndex(["b", "a", "c"], ["red shoes", "red shoes", "the blue, blue boats"])
    assert index.search("red shoe") == ["a", "b"], "equal scores: by name"
    assert index.search("blue boat") == ["c"] and index.search("BOATS") == ["c"]
    assert index.search("the") == index.search("") == index.search("plane") == []
    assert index.search("red blue", limit=1) == ["c"], "twice in a text, and rarer"


@pytest.mark.parametrize(
    ("items", "attributes", "file"),
    [(None, "{}", "items"), ("{}", "{}", "items"), (ITEMS, "[]", "attributes"), (ITEMS, "{}", "items")],
)
def test_files_that_are_none_of_webshops_are_named(tmp_path, items, attributes, file):
    (tmp_path / "attributes.json").write_text(attributes)
    if items is not None:
        (tmp_path / "items.json").write_text(items)
    with refused(str(tmp_path / f"{file}.json")):
        Catalogue.load(tmp_path / "items.json", tmp_path / "attributes.json")


@needs_golden
def test_products_are_read_as_officially(recorded):
    products, expected = recorded[False][0].products, read("prices.json")
    assert {asin: p.price for asin, p in products.items()} == expected["prices"]
    assert {asin: p.price_tag for asin, p in products.items()} == expected["price_tag"]
    assert {asin: {k: list(v) for k, v in p.options.items()} for asin, p in products.items()} == expected["options"]
