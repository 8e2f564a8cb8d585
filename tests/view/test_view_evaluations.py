"""The viewer of evaluations: what it takes from runs and evaluation folders, and two side by side in a browser."""

import re
from html.parser import HTMLParser

import pytest
from refusals import refused
from viewing import BAD_TEXT, evaluated, press, texts_of, trajectory, until, view, write_evaluation, write_run

from g2po_trl import write_jsonl
from g2po_trl.cli.commands.view import main
from g2po_trl.view import Evaluation, Run, Sources, write_page
from g2po_trl.view.page import InlinePage

CUP = "Put a cup on the desk."
SENTENCES = {"one": CUP, "two": BAD_TEXT, "three": "Cool an egg.", "four": None, "five": "Wash it."}


def played(task, names, reward):
    one = trajectory(task, names, reward, task=SENTENCES[task])
    for step in one.steps:
        step.advantage = 0.5 if one.success else -0.5
    return one


def of_panel(task, *facts, **more):
    return evaluated(task, *facts, task=SENTENCES[task], **more)


@pytest.fixture
def trained(tmp_path):
    """A run with two evaluations of a panel, one of another, and iterations, trained with GiGPO."""
    lost = {name: played(name, "hb", 0.0) for name in SENTENCES}
    won = {name: played(name, "ha", 10.0) for name in SENTENCES}
    files = {
        "eval-000000": [lost["one"], won["two"], lost["three"]],
        "eval-000004": [won["one"], lost["two"], lost["three"]],
        "test_hard-000004": [played("five", "x", 10.0)],
        "train-000001": [won["five"], lost["five"]],
        "replaced-000001": [lost["five"]] * 2,
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


def test_what_is_side_by_side_first(trained, evaluation, tmp_path):
    def evaluate(folder, *names):
        for name in names:
            write_jsonl(folder / "trajectories" / f"{name}.jsonl", [played("one", "ha", 10.0)])

    other = tmp_path / "other" / "trained"
    evaluate(other, "eval-000002")
    overview = Sources(Run(trained), Run(other)).overview()
    assert overview["pair"] == ["0-eval-4", "1-eval-2"], "the panel that both have"
    assert overview["training"] is False
    assert [one["name"] for one in overview["sources"]] == ["trained", "other/trained"]
    assert Sources(Evaluation(evaluation), Run(other)).overview()["pair"] == ["0-all", "1-eval-2"]
    evaluate(trained, "eval_t1-000000", "eval_t1-000004")
    assert Sources(Run(trained)).overview()["pair"] == ["0-eval-0", "0-eval-4"], "before and after"
    evaluate(trained, "report-000000", "report-000004", "test-000004")
    assert Sources(Run(trained)).overview()["pair"] == ["0-report-0", "0-report-4"], "the panel that chose nothing"


def test_a_damaged_line_and_iterations_are_refused(evaluation):
    with refused("iterations"):
        main([str(evaluation), "--no-open", "--iterations", "1"])
    with (evaluation / "trajectories" / "reflexion-1.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="line 3"):
        main([str(evaluation), "--no-open"])


def test_the_page_is_one_file_that_asks_for_nothing(evaluation, tmp_path):
    page = write_page(Sources(Evaluation(evaluation)), tmp_path / "page.html").read_text()
    assert set(re.findall(r"https?://[^\"']*", page)) == {"http://www.w3.org/2000/svg"}, "only the name of SVG"
    assert BAD_TEXT not in page and len(page) < 130_000


# -- in a browser -----------------------------------------------------------------------------------------------------


def choose(browser, side, name):
    browser.find_element("css selector", f"#set-of-{side} option[value='{name}']").click()


def test_an_evaluation_in_a_browser(evaluation, browser):
    view(browser, evaluation)
    filters = ["all 2", "solved 0", "solved by some episodes 1", "not solved 1", "no result 1"]
    assert texts_of(browser, "#filters button") == filters
    assert texts_of(browser, "#tasks .what") == [BAD_TEXT, CUP], "named by their sentences"
    assert texts_of(browser, "#tasks b, #tasks img") == [], "texts are text"
    assert texts_of(browser, "#numbers tbody td")[:2] == ["My games", "25.0"], "the last trial counts"
    notes = texts_of(browser, "#numbers p")[0]
    assert "50.0 (seed 0), 0.0 (seed 1)" in notes and "1 tasks have no result" in notes
    assert "1 lines of My games are not written to their end" in texts_of(browser, "#sides")[0]

    press(browser, "j")  # to task one: its won episode beside the one that was not
    assert texts_of(browser, "#tasks [aria-selected=true] .verdict") == ["1/2 solved"]
    assert texts_of(browser, ".head strong") == ["solved", "failed"]
    shown = texts_of(browser, "#episodes")[0]
    assert "Task one" in shown and "reflection 1, read by this trial" in shown
    assert "After 1 shared step they part: other observations." in shown
    press(browser, "s")
    assert texts_of(browser, ".head button") == ["seed 0, trial 1 ✗", "seed 0, trial 2 ✓", "seed 1, trial 1 ✗"]
    assert texts_of(browser, ".head strong") == ["solved"]
    press(browser, "5")  # the fifth filter
    assert texts_of(browser, "#tasks .what") == ["Task four"] and texts_of(browser, "#tasks .verdict") == ["no result"]


def test_two_runs_side_by_side_in_a_browser(trained, evaluation, browser):
    from selenium.webdriver.common.keys import Keys

    view(browser, trained, evaluation)
    both = ["all 2", "solved by A only 0", "solved by B only 0", "by both 1", "by neither 1"]
    assert texts_of(browser, "#filters button") == [*both, "only A has it 1", "only B has it 1"]
    assert "2 tasks are on both sides; 1 only A has and 1 only B has" in texts_of(browser, "#numbers")[0]
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
    assert "After 1 shared step they part: other observations." in texts_of(browser, "#episodes")[0]
    assert texts_of(browser, ".columns .shared .act") == ["→ go 0"]

    choose(browser, "A", "0-eval-0")
    until(browser, lambda b: texts_of(b, "#filters button")[1:3] == ["solved by A only 1", "solved by B only 1"])
    press(browser, Keys.ESCAPE)
    browser.execute_script("document.activeElement.blur()")
    press(browser, "3")  # won by B only
    assert texts_of(browser, "#tasks .what") == [CUP]
    press(browser, "/", "egg")
    assert texts_of(browser, "#tasks .note") == ["No such task."] and texts_of(browser, "#episodes")[0] == ""
    press(browser, Keys.ESCAPE)
    assert browser.switch_to.active_element.get_attribute("id") == "tasks"


def test_several_runs_are_compared(trained, evaluation, tmp_path, browser):
    """Three runs, two of which have logs, and one of these no evaluation; any two evaluations side by side."""

    def with_log(folder, files, *rates, **more):
        log = [{"step": n, "episode/success_rate": rate, "time/update": 1.0} for n, rate in enumerate(rates, 1)]
        return write_run(folder, files, log, **more)

    alone = write_run(tmp_path / "alone", {"train-000001": [played("one", "ha", 10.0)]})
    with refused("folder"):
        main([str(trained), str(alone), "--no-open"])
    panels = [{"name": name, "step": 4, "success_rate": 0.5} for name in ("eval", "eval_t1", "eval_t0_7", "test_t1")]
    with_log(trained, {}, 0.25, 0.75, evaluations=panels)
    with_log(alone, {}, 0.5)
    view(browser, alone, trained, evaluation)
    assert texts_of(browser, "#runs .key span") == ["alone", "trained"], "an evaluation is no training"
    assert len(texts_of(browser, "#runs .smooth")) == 2
    assert len(texts_of(browser, "#runs circle")) == 2, "none of eval at another temperature"
    assert texts_of(browser, ".side strong") == ["trained", evaluation.name], "the first two that have evaluations"
    choose(browser, "B", "1-eval-0")
    until(browser, lambda b: texts_of(b, ".side strong") == ["trained", "trained"])
    view(browser, alone, alone)
    assert not browser.find_element("id", "results").is_displayed()
    assert browser.find_element("id", "runs").is_displayed(), "their success alone"


def test_names_of_files_are_texts_in_the_page(trained):
    """A run may come from somebody else."""
    name = "'\"><img src=x onerror=alert(1)>&quot;<script>alert(2)"
    (trained / "trajectories" / "eval-000004.jsonl").rename(trained / "trajectories" / f"{name}-000004.jsonl")
    page = InlinePage(trained)
    elements = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: elements.append((tag, dict(attributes)))
    parser.feed(page.page)
    assert f"set-0-{name}-4" in [found.get("id") for tag, found in elements if tag == "script"]
    assert not [found for tag, found in elements if tag == "img" or any(one.startswith("on") for one in found)]
    (frame,) = re.findall(r"<iframe[^>]*>", page._repr_html_())
    assert 'sandbox="allow-scripts"' in frame, "its scripts have no part in the notebook"
