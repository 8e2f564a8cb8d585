"""A run that goes on: what the page shows of files that come and grow, and that its reader keeps his place."""

import json

import pytest
from refusals import refused
from viewing import opened, panel, served, trajectory, until, write_run

from g2po_trl import write_jsonl
from g2po_trl.view import Run, Sources, open_folder


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


def test_a_run_without_trajectories_is_for_the_server_alone(run):
    with refused("folder"):
        open_folder(run)
    assert Sources(open_folder(run, live=True)).overview()["training"] is False


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


@pytest.mark.parametrize("part", [0, 40, -400])
def test_a_half_written_iteration_is_shown_as_far_as_it_is(run, address, browser, part):
    whole = play(run, 1).read_bytes()
    path = play(run, 2)
    path.write_bytes(whole[:part])
    opened(browser, address)
    said = browser.find_element("tag name", "body").text
    assert "to the end: left out" in said if part < 0 else "No episode of this iteration is written" in said
    browser.execute_script("if (group) showTrajectory(0, 0)")
    path.write_bytes(whole)
    refresh(browser)
    assert state(browser)[0] == 2
    assert browser.execute_script("return shown.groups.map((g) => g.trajectories.length)") == [2, 2]
    assert panel(browser).startswith("Episode 1: solved" if part < 0 else "Task one")


def test_a_line_that_is_no_trajectory_is_reported_and_gone_when_it_is_mended(run, address, browser):
    path = play(run, 1)
    opened(browser, address)
    whole = path.read_bytes()
    path.write_bytes(b"{}\n" + whole)
    until(browser, lambda b: "line 1: not a trajectory" in b.find_element("id", "live").text)
    path.write_bytes(whole)
    until(browser, lambda b: b.find_element("id", "live").text.startswith("live"))
    browser.get_log("browser")  # the answer 500 is in it


def test_the_page_outlives_its_server(run, browser):
    play(run, 1)
    with served(Run(run)) as address:
        opened(browser, address)
    until(browser, lambda b: "the server has ended: g2po view run" in b.find_element("id", "live").text)
    assert "Task one" in panel(browser)
    browser.get_log("browser")


def test_green_is_for_states_from_which_an_episode_won(run, address, browser):
    """Group two lost all: its colours have no more green than red or blue, and are those of group one's lost state."""
    play(run, 1)
    opened(browser, address)
    colours = browser.execute_script(
        "return [0, 1].map((g) => { showGroup(g); return group.nodes.map((node, i) =>"
        " drawing.nodes.get(i).querySelector('.disc').getAttribute('fill').match(/\\d+/g).map(Number)); })"
    )
    green = [[g > max(r, b) for r, g, b in of_group] for of_group in colours]
    assert green == [[True, True, False], [False, False, False]]
    assert colours[0][2] == colours[1][0], "value 0 and nothing won: the same in every group"
    lost, won = trajectory("lost", "xy", 0.0), trajectory("won", "h", 10.0)
    mixed = [trajectory("mixed", "ha", 10.0), trajectory("mixed", "hb", 0.0)]
    write_run(run, {"train-000002": [lost, won], "train-000003": [lost, lost, *mixed]}, trainer={"gamma": 0.5})
    refresh(browser)
    for number, name in ((2, "lost"), (3, "mixed")):
        script = f"const done = arguments[0]; choose({number}).then(() => done(group.id))"
        assert browser.execute_async_script(script) == name
