"""WebShop as an environment: the invented shop can be won, its splits do not meet, and it is the same everywhere."""

from functools import partial

import pytest

pytest.importorskip("thefuzz")
pytest.importorskip("snowballstemmer")
pytest.importorskip("textblob")

from refusals import refused
from returning import check_played_again

from g2po_envs.webshop import ShopSource, WebshopEnvironment
from g2po_envs.webshop.words import split_words

SOURCE = ShopSource(products=60)


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
    episode = check_played_again(partial(WebshopEnvironment, SOURCE, partial_reward=True), row, actions)
    score = episode.info["score"]
    assert 0 < score < 1 and not episode.success and episode.reward == 10 * score
    environment = WebshopEnvironment(SOURCE)
    environment.reset(**row)
    assert [environment.step(action).reward for action in actions][-1] == 0


def test_splits_share_no_product_and_keep_their_order():
    goals = SOURCE.load()[1]
    train, held_out = SOURCE.rows("train"), SOURCE.rows("held-out")
    asins = [{goals[r["task_id"]].asin for r in rows} for rows in (train, held_out)]
    assert not asins[0] & asins[1] and len(asins[0] | asins[1]) == 60
    assert len(train) + len(held_out) == len(goals)
    with refused("number"):
        SOURCE.rows("train", 100_000)
    with refused("split"):
        SOURCE.rows("test")


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
        ("1½ ½ m² x²y ① ⑴", "1 m x y"),  # numbers have no word-break class: they end a word and are dropped
        ("１２ ٣٤ 3.5mm 10:30", "１２ ٣٤ 3.5mm 10 30"),  # digits of every script; a full stop joins them, a colon not
        ("紅茶 usbケーブル 한국어a", "紅 茶 usb ケーブル 한국어a"),  # ideographs one by one, katakana a run of its own
        ("👩‍💻👍🏽❤️ #️⃣ # ★☆", "👩‍💻 👍🏽 ❤️ #️⃣ ★"),  # an emoji with all that modifies it; ☆ is no pictograph
        ("b" * 300, f"{'b' * 255} {'b' * 45}"),  # 255 characters at most
    ],
)
def test_words_by_hand(text, words):
    """As the grammar of Lucene 8's StandardTokenizer says; its recordings have few such characters."""
    assert list(split_words(text)) == words.split(" ")
