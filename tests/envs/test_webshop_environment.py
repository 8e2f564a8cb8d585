"""WebShop as an environment: the invented shop can be won, its splits do not meet, and it is the same everywhere."""

import random
from dataclasses import replace
from functools import partial
from itertools import product as product_of

import pytest

pytest.importorskip("thefuzz")
pytest.importorskip("snowballstemmer")
pytest.importorskip("textblob")

from refusals import refused
from returning import check_played_again

from g2po_envs.webshop import Catalogue, ShopSource, WebshopEnvironment, synthetic_goals
from g2po_envs.webshop.nouns import textblob_nouns
from g2po_envs.webshop.reward import score
from g2po_envs.webshop.search import SearchIndex
from g2po_envs.webshop.words import split_words

SOURCE = ShopSource(products=60)
ITEMS = '[{"asin": "B000000001"}]'


@pytest.fixture(scope="module")
def row():
    return SOURCE.rows("train")[0]


def way_to(goal):
    """A shopper who knows the product: search, open, choose, buy."""
    chosen = [f"click[{value}]" for value in goal.options.values()]
    return [f"search[{goal.title}]", f"click[{goal.asin.lower()}]", *chosen, "click[buy now]"]


def test_every_goal_of_the_invented_shop_can_be_won():
    environment, goals = WebshopEnvironment(SOURCE), SOURCE.load()[1]
    for task_id, goal in goals.items():
        observation = environment.reset(task_id)
        assert observation.task == goal.instruction and goal.instruction not in observation.text
        for action in way_to(goal):
            assert action in observation.admissible_actions or action.startswith("search["), action
            result = environment.step(action)
            observation = result.observation
        assert result.terminated and result.reward == 10.0
        assert result.info == {"success": True, "score": 1.0, "score_corrected": 1.0}


def test_a_purchase_that_lacks_something_pays_nothing_or_its_score_in_every_process(row):
    way = way_to(SOURCE.load()[1][row["task_id"]])
    actions = [*way[:2], *way[3:]]  # without the first option
    for partial_reward in (False, True):
        episode = check_played_again(partial(WebshopEnvironment, SOURCE, partial_reward=partial_reward), row, actions)
        score = episode.info["score"]
        assert 0 < score < 1 and not episode.success
        assert episode.reward == (10 * score if partial_reward else 0)


def test_splits_share_no_product_and_keep_their_order():
    goals = SOURCE.load()[1]
    train, held_out = SOURCE.rows("train"), SOURCE.rows("held-out")
    asins = [{goals[r["task_id"]].asin for r in rows} for rows in (train, held_out)]
    assert not asins[0] & asins[1] and len(asins[0] | asins[1]) == 60
    assert len(train) + len(held_out) == len(goals)
    first = [goals[r["task_id"]].asin for r in held_out[: len(asins[1])]]
    assert len(set(first)) == len(first), "one of each product first"
    assert SOURCE.rows("train", 5) == train[:5]
    with refused("number"):
        SOURCE.rows("train", 100_000)
    with refused("split"):
        SOURCE.rows("test")


def test_plain_pages_for_tiny_models(row):
    official, plain = WebshopEnvironment(SOURCE), WebshopEnvironment(SOURCE, plain=True)
    search, pages = f"search[{SOURCE.load()[1][row['task_id']].query}]", []
    for environment in (official, plain):
        environment.reset(**row)
        pages.append(environment.step(search).observation)
    asins = official.shop.products
    assert len(asins) >= 3 and f"'{asins[2]}'" in pages[0].text
    text, actions = pages[0].text, pages[0].admissible_actions
    for place, asin in enumerate(asins, 1):
        text = text.replace(f"'{asin}'", f"'{place}'")
        actions = [a.replace(asin.lower(), str(place)) for a in actions]
    text = text.lower().replace("[sep]", "[SEP]")
    assert (text, actions) == (pages[1].text, pages[1].admissible_actions)
    opened = [official.step(f"click[{asins[2].lower()}]"), plain.step("click[3]")]
    shown = [result.observation.text.lower() for result in opened]
    assert shown[0] == shown[1] and plain.shop.asin == asins[2]


def test_a_goal_the_official_score_does_not_recognise_has_a_corrected_one():
    """Officially the chosen "blackwhite" becomes "black", and is compared with the text of ("color", "blackwhite")."""
    catalogue = SOURCE.load()[0]
    product = next(p for p in catalogue.products.values() if p.instruction and "color" in p.options)
    product = replace(product, options={"color": ("blackwhite", "pink")})
    goals = {goal.options["color"]: goal for goal in synthetic_goals(Catalogue({"x": product}), random.Random(0))}
    scores = {}
    for asked, chosen in product_of(("blackwhite", "pink"), repeat=2):
        bought = (product, goals[asked], product.price, {"color": chosen}, textblob_nouns)
        scores[asked, chosen] = (score(*bought)[0], score(*bought, corrected=True)[0])
    assert scores["blackwhite", "blackwhite"][0] < 1 == scores["blackwhite", "blackwhite"][1]
    assert scores["pink", "pink"] == (1, 1)
    for asked, chosen in (("pink", "blackwhite"), ("blackwhite", "pink")):
        assert scores[asked, chosen][0] == scores[asked, chosen][1] < 1, "a wrong colour is wrong in both"


def test_chosen_options_are_in_the_key_and_not_in_the_text(row):
    environment, goal = WebshopEnvironment(SOURCE), SOURCE.load()[1][row["task_id"]]
    environment.reset(**row)
    search, open_item, choose, *_ = way_to(goal)
    environment.step(search)
    before, after = environment.step(open_item).observation, environment.step(choose).observation
    assert before.text == after.text and before.state_key != after.state_key
    assert environment.step("nonsense").observation.state_key == after.state_key


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
