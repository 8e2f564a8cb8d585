"""Images of steps and boards of letters in the viewer. Images are data URLs, bounded in size, named by hashes."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from viewing import texts_of, until, view, write_run

from g2po_envs.sokoban import SokobanEnvironment, expert, make_level
from g2po_envs.sokoban.drawing import SQUARE, picture
from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.environments.validation import validate_observation, validate_step
from g2po_trl.rollout.episode import Episode
from g2po_trl.trajectory import image_file, read_jsonl
from g2po_trl.utils.images import as_picture
from g2po_trl.view import Run
from g2po_trl.view import texts as of_texts
from g2po_trl.view.texts import Texts


def solved(render, turns=20):
    """An episode that an expert plays."""
    environment, episode = SokobanEnvironment(render=render), Episode("level 3")
    episode.open(validate_observation(environment.reset("tiny", 3), "reset"))
    while episode.outcome is None and episode.turns < turns:
        action = expert(environment)
        episode.steps.append(episode.step(action, f"<think>so</think><action>{action}</action>"))
        episode.advance(validate_step(environment.step(action), "step"))
    return episode.trajectory()


@pytest.fixture
def folder(tmp_path):
    group = [solved("image"), solved("image"), solved("image", turns=2)]
    log = [{"step": 1, "episode/success_rate": 0.5}]
    return write_run(tmp_path / "drawn", {"train-000001": group}, log, trainer={"gamma": 0.5})


def test_drawn_levels_have_the_states_of_written_ones(folder):
    drawn, written = solved("image"), solved("text")
    assert [step.key for step in drawn.steps] == [step.observation for step in written.steps]
    assert {step.observation for step in drawn.steps} == {""} and len(drawn.steps) > 2
    grid = make_level("tiny", 3).draw()
    shown = np.array(drawn.steps[0].images[0].open())
    assert shown.shape == (5 * SQUARE, 5 * SQUARE, 3) and (shown == picture(grid)).all()
    row, column = divmod(grid.replace("\n", " ").split(" ").index("p"), 5)
    assert shown[int((row + 0.5) * SQUARE), int((column + 0.5) * SQUARE)].tolist() == [40, 90, 220]
    (file,) = (folder / "trajectories").glob("*.jsonl")
    read = list(read_jsonl(file))
    assert read[0].steps[0].images == drawn.steps[0].images
    assert image_file(file, read[0].steps[0].images[0]).read_bytes() == drawn.steps[0].images[0].png


def test_a_page_has_images_as_data_urls_of_bounded_size(folder, monkeypatch):
    data = Run(folder).iteration(1)
    steps = data["groups"][0]["trajectories"][0]["steps"]
    shown = [data["texts"][step["img"][0]] for step in steps]
    first = solved("image").steps[0].images[0]
    assert shown[0] == first.data_url and all(one.startswith("data:image/png;base64,") for one in shown)
    assert [data["texts"][node["img"][0]] for node in data["groups"][0]["nodes"] if "img" in node]

    def image(name):
        texts = Texts(folder)
        (number,) = texts.images([name])
        return texts.all[number]

    for name in ("../../run", "0" * 32, "<b>"):
        assert image(name).startswith("an image whose file")
    large = as_picture(np.random.default_rng(0).integers(0, 255, (700, 900, 3), dtype=np.uint8))
    drawn = Trajectory("a", [Step("", "b", images=[large])], 0.0, "failure")
    write_jsonl(folder / "trajectories" / "train-000001.jsonl", [drawn])
    data = base64.b64decode(image(large).partition(",")[2])
    assert Image.open(io.BytesIO(data)).size == (512, 398)
    monkeypatch.setattr(of_texts, "_PAGE_BYTES", 100)
    assert "too large" in image(first)


def test_the_page_draws_them(folder, browser):
    view(browser, folder)
    browser.execute_script("showTrajectory(0, 0)")
    until(browser, lambda b: b.execute_script("return document.querySelectorAll('img.seen').length"))
    widths = browser.execute_script("return [...document.querySelectorAll('img.seen')].map((one) => one.naturalWidth)")
    assert set(widths) == {5 * SQUARE}


# -- a board is drawn, with the text at hand; anything else stays text ------------------------------------------------

START = "# # # # #\n# p x o #\n# _ _ _ #\n# # # # #"
END = "# # # # #\n# _ p * #\n# _ _ _ #\n# # # # #"
NO_GRIDS = ["one line", "a b c\nd e f", "a b c\nd e\nf g h", "ab c d\ne f g\nh i j", "a\nb\nc", ""]


def test_boards_are_drawn(tmp_path, browser):
    played = [
        Trajectory("one", [Step(START, "right")], 10.0, "success", END),
        Trajectory("one", [Step(START, "down"), Step("You fall.", "up")], 0.0, "failure", f"{END}\nbox +0 +1"),
    ]
    view(browser, write_run(tmp_path, {"train-000001": played}))
    discs = browser.execute_script("return [...document.querySelectorAll('#graph .disc')].map((one) => one.tagName)")
    assert discs == ["rect", "circle"] and len(texts_of(browser, "#graph svg.board")) == 1
    browser.execute_script("showTrajectory(0, 0)")
    boards = browser.find_elements("css selector", "#panel svg.board")
    titles = [board.find_element("tag name", "title").get_attribute("textContent") for board in boards]
    assert titles == [START, END]
    # 14 walls and a box each; the player; a goal, on the floor and in the box.
    assert [len(board.find_elements("tag name", "rect")) for board in boards] == [15, 15]
    assert [len(board.find_elements("tag name", "circle")) for board in boards] == [2, 2]
    browser.execute_script("showTrajectory(1, 0)")
    texts = [one.text for one in browser.find_elements("css selector", "#panel .step > pre, #panel > div > pre")]
    assert texts == ["You fall.", "box +0 +1"] and len(texts_of(browser, "#panel svg")) == 2
    assert browser.execute_script("return arguments[0].map(gridOf)", NO_GRIDS) == [None] * len(NO_GRIDS)
    letters = browser.execute_script("return drawGrid(gridOf('S F x\\nF H <\\n_ _ G').rows).textContent")
    assert letters == "SFxFH<G", "without walls, the characters"
