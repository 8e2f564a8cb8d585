"""Images of steps and boards of letters in the viewer. Images are data URLs, bounded in size, named by hashes."""

import numpy as np
from viewing import until, view, write_run

from g2po_envs.sokoban import SokobanEnvironment, make_level
from g2po_envs.sokoban.drawing import picture
from g2po_trl import Step, Trajectory
from g2po_trl.utils.images import as_picture
from g2po_trl.view import texts as of_texts
from g2po_trl.view.texts import Texts

RNG = np.random.default_rng(0)
FIRST, LARGE = (as_picture(RNG.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in ((40, 60), (700, 900)))


def shown(name, folder):
    """What the page has for an image."""
    texts = Texts(folder)
    (number,) = texts.images([name])
    return texts.all[number]


def test_a_page_has_images_as_data_urls_of_bounded_size(tmp_path, browser, monkeypatch):
    episode = Trajectory("a", [Step("", "b", images=[FIRST]), Step("", "b", images=[LARGE])], 0.0, "failure")
    view(browser, write_run(tmp_path, {"train-000001": [episode]}))
    browser.execute_script("showTrajectory(0, 0)")
    drawn = "return [...document.querySelectorAll('img.seen')].map((one) => [one.naturalWidth, one.naturalHeight])"
    until(browser, lambda b: b.execute_script(drawn) == [[60, 40], [512, 398]])
    assert shown(FIRST, tmp_path) == FIRST.data_url and FIRST.data_url.startswith("data:image/png;base64,")
    for name in ("../../run", "0" * 32, "<b>"):
        assert shown(name, tmp_path).startswith("an image whose file")
    monkeypatch.setattr(of_texts, "_PAGE_BYTES", 100)
    assert "too large" in shown(FIRST, tmp_path)


def test_drawn_levels_have_the_states_of_written_ones():
    drawn, written = (SokobanEnvironment(render=way).reset("tiny", 3) for way in ("image", "text"))
    assert drawn.state_key == written.text and drawn.text == ""
    assert (np.array(drawn.images[0]) == picture(make_level("tiny", 3).draw())).all()


def test_boards_are_drawn_and_anything_else_stays_text(tmp_path, browser):
    start, end = "# # # # #\n# p x o #\n# _ _ _ #\n# # # # #", "# # # # #\n# _ p * #\n# _ _ _ #\n# # # # #"
    view(
        browser,
        write_run(tmp_path, {"train-000001": [Trajectory("one", [Step(start, "right")], 10.0, "success", end)]}),
    )
    browser.execute_script("showTrajectory(0, 0)")
    boards = browser.find_elements("css selector", "#panel svg.board")
    titles = [board.find_element("tag name", "title").get_attribute("textContent") for board in boards]
    assert titles == [start, end]
    # 14 walls and a box each; the player; a goal, on the floor and in the box.
    assert [len(board.find_elements("tag name", "rect")) for board in boards] == [15, 15]
    assert [len(board.find_elements("tag name", "circle")) for board in boards] == [2, 2]
    no_grids = ["one line", "a b c\nd e f", "a b c\nd e\nf g h", "ab c d\ne f g\nh i j", "a\nb\nc", ""]
    assert browser.execute_script("return arguments[0].map(gridOf)", no_grids) == [None] * len(no_grids)
