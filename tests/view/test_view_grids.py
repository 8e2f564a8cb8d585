"""Grids in the viewer: a board is drawn, with the text at hand; anything else stays text."""

from viewing import opened

from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.cli.commands.view import main
from g2po_trl.utils.json import write_json

START = "# # # # #\n# p x o #\n# _ _ _ #\n# # # # #"
END = "# # # # #\n# _ p * #\n# _ _ _ #\n# # # # #"
NO_GRIDS = ["one line", "a b c\nd e f", "a b c\nd e\nf g h", "ab c d\ne f g\nh i j", "a\nb\nc", ""]


def test_boards_are_drawn(tmp_path, browser):
    from selenium.webdriver.common.by import By

    played = [
        Trajectory("one", [Step(START, "right")], 10.0, "success", END),
        Trajectory("one", [Step(START, "down"), Step("You fall.", "up")], 0.0, "failure", f"{END}\nbox +0 +1"),
    ]
    write_jsonl(tmp_path / "trajectories" / "train-000001.jsonl", played)
    write_json(tmp_path / "run.json", {"trainer": {"gamma": 0.5, "advantage_estimator": "g2po"}})
    main([str(tmp_path), "--no-open"])
    opened(browser, (tmp_path / "view.html").as_uri())

    discs = browser.execute_script("return [...document.querySelectorAll('#graph .disc')].map((one) => one.tagName)")
    assert discs == ["rect", "circle"] and len(browser.find_elements(By.CSS_SELECTOR, "#graph svg.board")) == 1
    browser.execute_script("showTrajectory(0, 0)")
    boards = browser.find_elements(By.CSS_SELECTOR, "#panel svg.board")
    assert [board.find_element(By.TAG_NAME, "title").get_attribute("textContent") for board in boards] == [START, END]
    # 14 walls and a box each; the player; a goal, on the floor and in the box.
    assert [len(board.find_elements(By.TAG_NAME, "rect")) for board in boards] == [15, 15]
    assert [len(board.find_elements(By.TAG_NAME, "circle")) for board in boards] == [2, 2]
    browser.execute_script("showTrajectory(1, 0)")
    texts = [one.text for one in browser.find_elements(By.CSS_SELECTOR, "#panel .step > pre, #panel > div > pre")]
    assert texts == ["You fall.", "box +0 +1"] and len(browser.find_elements(By.CSS_SELECTOR, "#panel svg")) == 2

    assert browser.execute_script("return arguments[0].map(gridOf)", NO_GRIDS) == [None] * len(NO_GRIDS)
    letters = browser.execute_script("return drawGrid(gridOf('S F x\\nF H <\\n_ _ G').rows).textContent")
    assert letters == "SFxFH<G", "without walls, the characters"
