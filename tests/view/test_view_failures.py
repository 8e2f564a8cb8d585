"""Why an agent fails: turning points, groups without a learning signal, the index of a run, large runs."""

import numpy as np
import pytest
from viewing import texts_of, tool_step, trajectory, until, view, write_run

from g2po_trl import StateGraph, Step, Trajectory, write_jsonl
from g2po_trl.view import page
from g2po_trl.view.groups import taught_nothing, turning_points
from g2po_trl.view.index import EpisodeIndex

ATTACKS = ["<script>document.title='taken'</script>", "</script><img src=x onerror=\"document.title='taken'\">"]
ATTACKS += ["javascript:document.title='taken'", "\"' onmouseover='document.title=1'", "{{7*7}} ${7*7} \u2028 ]]>"]
INDEXED = "return document.body.dataset.index"


def turns_of(group):
    return turning_points(group, StateGraph.from_groups([group], gamma=0.5))


def test_turning_points_by_hand():
    """The largest fall, the turn limit and the fall before it; where nothing was won, the first fault or return."""
    won = [trajectory("t", "ha", 10.0), trajectory("t", "hba", 10.0)]
    # gamma 0.5. V: h 3.75 / 3 of (2.5, 1.25, 0), b 2.5 / 2, a 5, c 0.
    fall = {"step": 1, "why": "fall", "from": 1.25, "to": 0.0}
    assert turns_of([*won, trajectory("t", "hbc", 0.0)]) == [[], [], [fall]]
    # V: h (2.5 + 0 + 0) / 3, c and d 0, a (5 + 0) / 2.
    limit = {"step": 3, "why": "limit", "from": 2.5, "to": 0.0}
    cut = trajectory("t", "hcha", 0.0, "truncated")
    assert turns_of([won[0], cut])[1] == [limit, {"step": 0, "why": "fall", "from": 0.8333, "to": 0.0}]
    fault, back = trajectory("t", "abc", 0.0), trajectory("t", "abbac", 0.0)
    for step in (*fault.steps, *back.steps):
        step.admissible_actions = [step.action]
    fault.steps[1].valid = False
    assert turns_of([fault]) == [[{"step": 1, "why": "fault"}]]
    assert turns_of([back]) == [[{"step": 1, "why": "return"}]], "the step to b again"


def test_a_group_that_taught_nothing_says_why():
    won, lost = trajectory("t", "h", 10.0), trajectory("t", "h", 0.0)
    error = Trajectory("t", [], 0.0, "error", error="boom")
    told = [[won, won], [lost, lost], [won, error], [error, error], [won, lost]]
    assert [taught_nothing(one, np.zeros(2)) for one in told] == ["solved", "failed", "one", "errors", "equal"]
    assert taught_nothing(told[0], np.array([0.1, 0.1])) is None, "wins of different length teach"


def test_the_index_reads_changed_files_again(tmp_path):
    index = EpisodeIndex(tmp_path)
    for task in ("one", "two"):
        write_jsonl(tmp_path / "trajectories" / "train-000001.jsonl", [trajectory(task, "ha", 10.0)])
        (iteration,) = index.data()["iterations"]
        assert index.data()["tasks"][iteration["groups"][0]["task"]]["id"] == task


def test_a_large_run_is_a_page_and_files_that_it_loads(tmp_path, browser, monkeypatch):
    groups = {f"train-{number:06d}": [trajectory(f"t{number}", "ha", 10.0)] * 2 for number in (1, 2, 3)}
    write_run(tmp_path, groups)
    data = tmp_path / "view-data"
    data.mkdir()
    for name in ("9.js", "mine.js"):
        (data / name).write_text("old")
    monkeypatch.setattr(page, "LARGEST", 100)
    view(browser, tmp_path)
    assert {path.name for path in data.iterdir()} == {"mine.js", "0.js", "1.js", "2.js", "3.js"}, "a user's file stays"
    until(browser, lambda b: b.execute_script(INDEXED) == "yes")
    assert browser.execute_async_script("const done = arguments[0]; choose(1).then(() => done(group.id))") == "t1"


@pytest.fixture
def run(tmp_path):
    """Task one is won by one of three episodes, task two by none; its goal, states, actions and names are attacks."""
    facts = {"task": "Go.", "row": {"seed": 7}}
    one = [trajectory("one", "ha", 10.0, **facts), trajectory("one", "hbb", 0.0, **facts)]
    one.append(trajectory("one", "hac", 0.0, "truncated", **facts))
    one[0].steps[0].state_key = "room h, lamp on"
    steps = [Step(text, text, completion=text, state_key=text[::-1], admissible_actions=[text]) for text in ATTACKS]
    steps[2].admissible_actions = ["other"]
    two = [Trajectory("two", steps, 0.0, "failure", ATTACKS[0], task=ATTACKS[1], row={"x": ATTACKS[1]})] * 2
    called = tool_step(ATTACKS[1], "unknown", {"y": ATTACKS[0]})
    two.append(Trajectory("two", [called], 0.0, "failure", task=ATTACKS[1]))
    files = {}
    for number in (1, 2):
        files |= {f"train-{number:06d}": one + two, f'eval">{ATTACKS[0].replace("/", "")}-{number:06d}': two}
    return write_run(tmp_path, files, trainer={"gamma": 0.5, "max_turns": ATTACKS[1]})


@pytest.fixture
def at_run(run, browser):
    view(browser, run)
    until(browser, lambda b: b.execute_script(INDEXED) == "yes")
    return browser


def click(browser, selector):
    browser.execute_script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
    browser.find_element("css selector", selector).click()


def test_an_episode_names_the_better_action(tmp_path, browser):
    ends = [
        Trajectory("t", [Step("room", way)], pays, "success" if pays else "failure")
        for way, pays in zip("llr", (9, 9, 0))
    ]
    view(browser, write_run(tmp_path, {"train-000001": ends}, trainer={"gamma": 1.0, "scale_by_std": False}))
    click(browser, "#panel .episodes li:nth-child(3) button")
    # Rewards 9, 9, 0 have mean 6: +3 for each of A_EP, A_NC and A_EC, or −6.
    assert "State visited 3 times. 2 others left by “l”, +9.00 against −18.00." in texts_of(browser, "#panel")[0]


def test_from_lost_groups_to_the_wrong_step_in_four_clicks(at_run):
    click(at_run, "#tab-failures")
    assert texts_of(at_run, "#verdict")[0].startswith("2 of 4 groups failed in every episode")
    click(at_run, "#verdict button")  # those that were lost
    assert len(at_run.find_elements("css selector", ".heat tbody tr")) == 1
    click(at_run, ".heat tbody td:nth-child(4) button")
    until(at_run, lambda b: "No learning signal: all episodes failed" in texts_of(b, "#panel")[0])
    click(at_run, "#panel .turn")
    here = texts_of(at_run, "#panel .here")[0]
    assert here.startswith("3. V 0.00") and "not admissible" in here and "turning point" in here


def test_an_open_episode_is_a_path_with_a_command_to_copy(run, at_run):
    at_run.execute_script("showTrajectory(2, 2)")
    keys = "return [...drawing.lines].filter(([, part]) => part.classList.contains(arguments[0])).map(([key]) => key)"
    walked = "return group.trajectories[2].steps.map((_, s) => edgeKey(group.trajectories[2], s))"
    assert at_run.execute_script(keys, "path") == at_run.execute_script(walked)
    assert at_run.execute_script(keys, "turn") == ["1>4"], "from a, worth most, to c"
    assert "turn limit" in texts_of(at_run, "#panel .here")[0]
    assert texts_of(at_run, "#panel .command code")[0] == f"g2po view {run} --text --episode 1.3 --iterations 2"


def test_episodes_are_searched_and_tools_counted(at_run):
    click(at_run, "#tab-failures")
    found = "return episodesWith(arguments[0], arguments[1], arguments[2]).map((one) => [one.n, one.g, one.e])"
    assert at_run.execute_script(found, ["room", "c"], "state", "all") == [[2, 0, 2], [1, 0, 2]]
    assert at_run.execute_script(found, ["7"], "task", "truncated") == [[2, 0, 2], [1, 0, 2]]
    assert at_run.execute_script(found, ["go", "2"], "task", "failure") == []
    assert at_run.find_element("css selector", "#tools tbody tr").text == f"{ATTACKS[1]} 2 0 2"


def test_nothing_that_was_recorded_runs(at_run):
    """Names of files, tools, tasks, states, keys and settings."""
    views = ["show('failures')", "choose(2, 1)", "show('evaluations')"]
    for panel in ("Overview()", "Trajectory(0, 1)", "Trajectory(2, 0)", "Node(1)", "Edge(drawing.edges[0])"):
        views.append(f"choose(2, 1).then(() => show{panel})")
    for shown in views:
        script = f"const done = arguments[0]; {shown}.then(() => done('ok'), (e) => done(`${{e}}`))"
        assert at_run.execute_async_script(script) == "ok" and "taken" not in at_run.title
    active = "main script, main img, main iframe, [onerror], [onmouseover], main a:not([href^='#'])"
    assert at_run.execute_script("return document.querySelectorAll(arguments[0]).length", active) == 0
    at_run.execute_script("document.body.insertAdjacentHTML('beforeend', '<b onclick=\"document.title = 1\">x</b>')")
    at_run.execute_script("document.querySelector('body > b').click()")
    assert "taken" not in at_run.title and at_run.title != "1", "the page's policy allows its own script alone"
    at_run.get_log("browser")  # what was refused is in it
