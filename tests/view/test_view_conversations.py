"""The viewer of conversations: messages, tool calls and results, what agents did wrong, and logged runs."""

from logged_walks import conversation, write
from viewing import RESULT, conversations, texts_of, until, view, write_run

from g2po_trl.cli import main


def test_conversations_in_a_browser(tmp_path, browser):
    files = dict.fromkeys(("train-000001", "eval-000000"), conversations())
    view(browser, write_run(tmp_path / "agent", files, trainer={"gamma": 0.5}, estimator={"estimator_name": "gigpo"}))
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


def test_a_log_is_no_training_run(tmp_path, browser):
    walks = [("t", 1, ["hall", "mug"]), ("t", 0, ["cellar"]), ("alone", 1, ["hall"])]
    lines = [{"task_id": task, "reward": reward, "messages": conversation(*way)} for task, reward, way in walks]
    main(["credit", write(tmp_path / "runs.jsonl", lines)])
    view(browser, tmp_path / "runs-credit")
    assert browser.title == "runs.jsonl, logged runs – g2po-trl"
    assert "Trained" not in (shown := browser.find_element("tag name", "body").text) and "Iteration" not in shown
    for hidden in ("curves", "choose-iteration", "iteration-keys"):
        assert not browser.find_element("id", hidden).is_displayed(), hidden
    for group, columns in ((0, ["A_EP", "A_NC", "A_EC", "advantage"]), (1, [])):
        browser.execute_script(f"showGroup({group}); showNode(0)")
        assert texts_of(browser, "#panel th") == ["action", "times", *columns, "solved"]
    assert browser.execute_script("return edgesOf(group).map((edge) => edge.advantage)") == [None]
