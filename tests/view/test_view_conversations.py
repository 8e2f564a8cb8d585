"""The viewer of conversations: messages, tool calls and results, what agents did wrong, and logged runs."""

import json

import pytest
from viewing import RESULT, USER, conversations, opened, texts_of, until, write_run

from g2po_trl.cli.commands.view import main


@pytest.fixture
def folder(tmp_path):
    files = dict.fromkeys(("train-000001", "eval-000000"), conversations())
    return write_run(tmp_path / "agent", files, trainer={"gamma": 0.5}, estimator={"estimator_name": "gigpo"})


def test_conversations_in_a_browser(folder, browser):
    main([str(folder), "--no-open"])
    opened(browser, (folder / "view.html").as_uri())
    browser.execute_script("showTrajectory(0, 1)")
    roles = [texts_of(browser, f"#panel .step:nth-child({n}) .message .role") for n in (4, 5, 6)]
    afresh = ["system", "user", "assistant", "tool search", "assistant", "tool", "assistant"]
    assert roles == [["system", "user", "assistant"], ["tool search", "assistant"], afresh]
    assert texts_of(browser, "#panel .step:nth-child(6) details .role") == afresh[:5], "what was read before is folded"
    assert texts_of(browser, "#panel .step:nth-child(5) .tool pre") == [RESULT["content"]]
    assert texts_of(browser, "#panel .step:nth-child(5) .call") == ['open {"id": 7}']

    browser.execute_script("showTrajectory(1, 0)")
    assert "KeyError" in texts_of(browser, "#panel .error")[0] and len(texts_of(browser, "#panel .fact")) == 2
    assert texts_of(browser, "#panel > details summary") == ["traceback", "diff", "info"]

    browser.execute_script("showNode(1)")
    assert texts_of(browser, "#panel > .message pre") == [RESULT["content"]]
    assert set(texts_of(browser, "#panel tr.action td:first-child")) == {'open({"id": 7})', "No idea."}

    browser.find_element("id", "tab-evaluations").click()
    until(browser, lambda b: texts_of(b, "#episodes .columns.two .message"))
    assert texts_of(browser, "#episodes .shared .role") == ["system", "user", "assistant"]
    assert browser.title == "agent – g2po-trl", "a script in a tool's result is text"
    made = "#panel script, #panel img, #episodes script, #episodes img"
    assert browser.execute_script("return document.querySelectorAll(arguments[0]).length", made) == 0


def test_a_log_is_no_training_run(tmp_path, browser, capsys):
    from g2po_trl.cli import main as command

    def line(task, reward, *places):
        calls = [{"function": {"name": "go", "arguments": json.dumps({"to": place})}} for place in places]
        turns = [
            message
            for one in calls
            for message in (
                {"role": "assistant", "content": None, "tool_calls": [one]},
                {"role": "tool", "content": "ok"},
            )
        ]
        return json.dumps({"task_id": task, "reward": reward, "messages": [USER, *turns]})

    log = tmp_path / "runs.jsonl"
    log.write_text("\n".join([line("t", 1, "hall", "mug"), line("t", 0, "cellar"), line("alone", 1, "hall")]))
    command(["credit", str(log)])
    main([str(tmp_path / "runs-credit"), "--no-open"])
    opened(browser, (tmp_path / "runs-credit" / "view.html").as_uri())
    assert browser.title == "runs.jsonl, logged runs – g2po-trl"
    assert "Trained" not in (shown := browser.find_element("tag name", "body").text) and "Iteration" not in shown
    for hidden in ("curves", "choose-iteration", "iteration-keys"):
        assert not browser.find_element("id", hidden).is_displayed(), hidden
    for group, columns in ((0, ["A_EP", "A_NC", "A_EC", "advantage"]), (1, [])):
        browser.execute_script(f"showGroup({group}); showNode(0)")
        assert texts_of(browser, "#panel th") == ["action", "times", *columns, "solved"]
    assert browser.execute_script("return edgesOf(group).map((edge) => edge.advantage)") == [None]
