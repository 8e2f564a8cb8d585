"""The viewer of conversations: messages, tool calls and results, what agents did wrong."""

from viewing import RESULT, conversations, texts_of, until, view, write_run


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
