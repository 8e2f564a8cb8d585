"""A run that goes on: what the page shows of files that come and grow, and that its reader keeps his place."""

import json

import pytest
from viewing import opened, panel, served, trajectory, until, write_run

from g2po_trl import write_jsonl
from g2po_trl.view import open_folder


@pytest.fixture
def run(tmp_path):
    """A run that has begun and has not played yet."""
    return write_run(tmp_path / "run", {}, trainer={"gamma": 0.5})


@pytest.fixture
def address(run):
    with served(open_folder(run, live=True)) as address:
        yield address


def play(run, number):
    """Write an iteration of two groups, and its log line."""
    one = [trajectory("one", "ha", 10.0), trajectory("one", "hb", 0.0)]
    lost = [trajectory("two", "xy", 0.0), trajectory("two", "xz", 0.0)]
    path = run / "trajectories" / f"train-{number:06d}.jsonl"
    write_jsonl(path, [*one, *lost])
    with (run / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": number, "episode/success_rate": 0.25, "time/update": 1.0}) + "\n")
    return path


def refresh(browser):
    script = "const done = arguments[0]; refresh().then(() => done('ok'), (e) => done(`${e}`))"
    assert browser.execute_async_script(script) == "ok"


def state(browser):
    return browser.execute_script("return [shown.n, run.iterations.length, run.curves.length, location.hash]")


def test_the_page_follows_the_run_until_its_reader_chooses(run, address, browser):
    opened(browser, address)
    assert "first iteration is shown here" in browser.find_element("id", "waiting").text
    play(run, 1)
    until(browser, lambda b: b.execute_script("return shown && shown.n") == 1)  # by itself
    assert not browser.find_element("id", "waiting").is_displayed()
    play(run, 2)
    refresh(browser)
    assert state(browser) == [2, 2, 2, ""], "who has chosen nothing is shown the newest"
    browser.execute_script("showGroup(1); showTrajectory(1, 1)")
    play(run, 3)
    refresh(browser)
    assert state(browser) == [2, 3, 3, "#iteration=2&group=2&episode=2&step=2"]
    assert panel(browser).startswith("Episode 2: failed")
    browser.find_element("id", "newest").click()
    until(browser, lambda b: state(b) == [3, 3, 3, ""])


@pytest.mark.parametrize("part", [40, -400])
def test_a_half_written_iteration_is_shown_as_far_as_it_is(run, address, browser, part):
    whole = play(run, 1).read_bytes()
    path = play(run, 2)
    path.write_bytes(whole[:part])
    opened(browser, address)
    said = browser.find_element("tag name", "body").text
    assert "not complete, and left out" in said if part < 0 else "No episode of this iteration is complete" in said
    path.write_bytes(whole)
    refresh(browser)
    assert state(browser)[0] == 2
    assert browser.execute_script("return shown.groups.map((g) => g.trajectories.length)") == [2, 2]
