"""The viewer of evaluations: what it takes from runs and evaluation folders, and two side by side in a browser."""

import re

import pytest
from viewing import BAD_TEXT, evaluated, press, texts_of, trajectory, until, view, write_evaluation, write_run

from g2po_trl.view import Run, Sources
from g2po_trl.view.page import InlinePage

CUP = "Put a cup on the desk."
SENTENCES = {"one": CUP, "two": BAD_TEXT, "three": "Cool an egg.", "four": None}


def played(task, names, reward):
    one = trajectory(task, names, reward, task=SENTENCES[task])
    for step in one.steps:
        step.advantage = 0.5 if one.success else -0.5
    return one


def of_panel(task, *facts, **more):
    return evaluated(task, *facts, task=SENTENCES[task], **more)


@pytest.fixture
def trained(tmp_path):
    """A run with two evaluations of a panel and an iteration, trained with GiGPO."""
    lost = {name: played(name, "hb", 0.0) for name in SENTENCES}
    won = {name: played(name, "ha", 10.0) for name in SENTENCES}
    files = {
        "eval-000000": [lost["one"], won["two"], lost["three"]],
        "eval-000004": [won["one"], lost["two"], lost["three"]],
        "train-000001": [won["four"], lost["four"]],
    }
    settings = {"estimator_name": "gigpo", "gamma": 0.9, "value_lambda": 1.0, "max_turns": 5}
    evaluations = [{"step": 0, "success_rate": 1 / 3}, {"name": "eval", "step": 4, "success_rate": 1 / 3}]
    return write_run(tmp_path / "trained", files, evaluations=evaluations, estimator=settings)


@pytest.fixture
def evaluation(tmp_path):
    """Two seeds of tasks two, one and four; of task one in seed 0 two trials. The last line is not written yet."""
    two, one = of_panel("two", "hb", 0.0, 0), of_panel("one", "hb", 0.0, 1)
    early = of_panel("one", "hb", 0.0, 1, last=False)
    late = of_panel("one", "hca", 10.0, 1, trial=1, notes=["take the other way"])
    return write_evaluation(tmp_path / "evaluation", [two, early, late, of_panel("four", "", 0.0, 2)], [two, one])


def test_what_is_side_by_side_first(trained, tmp_path):
    episodes = [played("one", "ha", 10.0)]
    other = write_run(tmp_path / "other" / "trained", {"eval-000002": episodes})
    overview = Sources(Run(trained), Run(other)).overview()
    assert overview["pair"] == ["0-eval-4", "1-eval-2"], "the panel that both have"
    assert [one["name"] for one in overview["sources"]] == ["trained", "other/trained"]
    write_run(trained, {"report-000000": episodes, "report-000004": episodes, "test-000004": episodes})
    assert Sources(Run(trained)).overview()["pair"] == ["0-report-0", "0-report-4"], "the panel that chose nothing"


def choose(browser, side, name):
    browser.find_element("css selector", f"#set-of-{side} option[value='{name}']").click()


def test_an_evaluation_in_a_browser(evaluation, browser):
    view(browser, evaluation)
    page = (evaluation / "view.html").read_text()
    assert set(re.findall(r"https?://[^\"']*", page)) == {"http://www.w3.org/2000/svg"}, "it asks for nothing"
    (frame,) = re.findall(r"<iframe[^>]*>", InlinePage(evaluation)._repr_html_())
    assert 'sandbox="allow-scripts"' in frame, "its scripts have no part in a notebook"
    filters = ["all 2", "solved 0", "solved by some episodes 1", "not solved 1", "no result 1"]
    assert texts_of(browser, "#filters button") == filters
    assert texts_of(browser, "#tasks .what") == [BAD_TEXT, CUP], "named by their sentences"
    assert texts_of(browser, "#tasks b, #tasks img") == [], "texts are text"
    assert texts_of(browser, "#numbers tbody td")[:2] == ["My games", "25.0"], "the last trial counts"
    assert "50.0 (seed 0), 0.0 (seed 1)" in texts_of(browser, "#numbers p")[0]
    assert "1 lines of My games are not complete" in texts_of(browser, "#sides")[0]

    press(browser, "j")  # to task one: its won episode beside the one that was not
    assert texts_of(browser, "#tasks [aria-selected=true] .verdict") == ["1/2 solved"]
    assert texts_of(browser, ".head strong") == ["solved", "failed"]
    shown = texts_of(browser, "#episodes")[0]
    assert "Task one" in shown and "reflection 1, read by this trial" in shown
    assert "They differ after 1 shared step: different observations." in shown
    press(browser, "s")
    assert texts_of(browser, ".head button") == ["seed 0, trial 1 ✗", "seed 0, trial 2 ✓", "seed 1, trial 1 ✗"]
    assert texts_of(browser, ".head strong") == ["solved"]


def test_two_runs_side_by_side_in_a_browser(trained, evaluation, browser):
    view(browser, trained, evaluation)
    both = ["all 2", "solved by A only 0", "solved by B only 0", "by both 1", "by neither 1"]
    assert texts_of(browser, "#filters button") == [*both, "only A has it 1", "only B has it 1"]
    assert texts_of(browser, "#tasks .verdict") == ["A ✓ solved", "B 1/2 solved", "A ✗ not solved", "B 0/2 solved"]
    rows = [texts_of(browser, f"#numbers tbody tr:nth-child({n}) td")[:2] for n in (1, 2, 3)]
    assert rows == [["A", "50.0"], ["B", "25.0"], ["B − A", "−25.0"]], "two tasks have no interval"
    script = (  # of differences, with 95 % intervals
        "const task = (is) => ({ episodes: [{ last: true, outcome: is ? 'success' : 'failure' }] });"
        "return arguments[0].map((won) => paired(won.map((is) => ({ tasks: [task(false), task(is)] }))));"
    )
    gaps = [[True, *[False] * 9], [True] * 10, [True] * 8 + [False]]
    # One of ten: mean 0.1, deviation 0.316, 1.96 * 0.316 / sqrt(10) = 0.196. None if equal, or fewer than ten.
    assert browser.execute_script(script, gaps) == ["+10.0 ± 19.6", "+100.0", "+88.9"]

    choose(browser, "A", "0-eval-0")
    until(browser, lambda b: texts_of(b, "#filters button")[1:3] == ["solved by A only 1", "solved by B only 1"])
    browser.execute_script("document.activeElement.blur()")
    press(browser, "3")  # won by B only
    assert texts_of(browser, "#tasks .what") == [CUP]
