"""The viewer of conversations: messages, tool calls and results, what agents did wrong, and logged runs."""

import json

import pytest
from viewing import BAD_TEXT, opened, until

from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.cli.commands.view import main
from g2po_trl.prompts.conversation import as_text, response_action
from g2po_trl.prompts.state_keys import request_key
from g2po_trl.utils.json import write_json
from g2po_trl.view import Run
from g2po_trl.view.texts import Texts, episode_data, step_data
from g2po_trl.view.words import NOTHING, action_text, state_text

SCRIPT = "<script>document.title = 'taken'</script>"
SYSTEM = {"role": "system", "content": "You look for books."}
USER = {"role": "user", "content": "Which was the last?"}
LONG = {"limit": 5, "query": "the sea " * 10}  # in the order of their names, as actions have them
RESULT = {"role": "tool", "name": "search", "content": f"{SCRIPT} {BAD_TEXT}"}
SEARCH = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [{"function": {"name": "search", "arguments": LONG}}],
}
OPEN = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "open", "arguments": {"id": 7}}}]}


def step(messages, answer, **fields):
    fields = {"completion": "<raw>", "state_key": request_key(messages), **fields}
    return Step(as_text(messages), response_action(answer), messages=messages, **fields)


def said(text):
    return {"role": "assistant", "content": text}


def episodes():
    """One that searches, opens and answers, its last prompt rendered afresh; one whose agent raises."""
    afresh = [SYSTEM, USER, SEARCH, RESULT, OPEN, {"role": "tool", "content": "The Land"}]
    good = [step([SYSTEM, USER], SEARCH), step([RESULT], OPEN), step(afresh, said("The Land."))]
    bad = [step([SYSTEM, USER], SEARCH), step([RESULT], said("No idea."))]
    info = {
        "success": False,
        "traceback": f"KeyError: {BAD_TEXT}",
        "refused_requests": 2,
        "ignored_fields": ["temperature", "top_p"],
        "pages": 3,
        "diff": f"--- a/x\n+{SCRIPT}\n",
    }
    return [
        Trajectory("books", good, 10.0, "success", "The agent returned.", task="Find the book"),
        Trajectory("books", bad, 0.0, "failure", failure_reason="agent error: KeyError", info=info),
    ]


@pytest.fixture
def folder(tmp_path):
    for trajectory in (played := episodes()):
        for one in trajectory.steps:
            one.advantage = 0.5 if trajectory.success else -0.5
    for name in ("train-000001", "eval-000000"):
        write_jsonl(tmp_path / "agent" / "trajectories" / f"{name}.jsonl", played)
    write_json(tmp_path / "agent" / "run.json", {"trainer": {"gamma": 0.5}, "estimator": {"estimator_name": "gigpo"}})
    return tmp_path / "agent"


def test_steps_in_words():
    good, _ = episodes()
    assert [state_text(one) for one in good.steps] == [
        "user: Which was the last?",
        f"tool: {RESULT['content']}",
        "tool: The Land",
    ]
    query = json.dumps(LONG)
    assert [action_text(one) for one in good.steps] == [f"search({query})", 'open({"id": 7})', "The Land."]
    assert state_text(step([SYSTEM], said(""))) == "system: You look for books.", "if there is nothing else"
    assert action_text(step([SYSTEM], said(""))) == state_text(step([], said(""))) == NOTHING
    texts = Step("Hall.", '{"content": "go"}', completion="<action>go</action>")
    assert (state_text(texts), action_text(texts)) == ("Hall.", '{"content": "go"}'), "an environment of texts"
    assert action_text(Step("o", "free text", messages=[USER])) == "free text"


def test_messages_as_data():
    texts = Texts()
    first, second, third = (step_data(one, texts, None) for one in episodes()[0].steps)
    assert [(m["role"], texts.all[m["c"]]) for m in first["m"]] == [(m["role"], m["content"]) for m in (SYSTEM, USER)]
    (name, given), content = first["said"]["calls"][0], texts.all[first["said"]["c"]]
    assert (name, content) == ("search", "Let me see.") and texts.all[given] == json.dumps(LONG, indent=2)
    assert texts.all[second["said"]["calls"][0][1]] == '{"id": 7}', "short arguments are on one line"
    assert second["m"][0]["name"] == "search"
    assert [one["old"] for one in (first, second, third)] == [0, 0, 5]
    assert "m" not in step_data(Step("o", "a"), texts, None)


def test_facts_of_agents_are_data_and_others_are_not():
    texts = Texts()
    facts = episode_data(episodes()[1], texts)["facts"]
    assert texts.all[facts.pop("other")] == '{"pages": 3}'
    assert texts.all[facts.pop("diff")] == f"--- a/x\n+{SCRIPT}\n"
    assert facts == {
        "ignored_fields": ["temperature", "top_p"],
        "refused_requests": 2,
        "traceback": f"KeyError: {BAD_TEXT}",
    }
    info = {"out_of_turns": True, "room": 3}
    assert episode_data(Trajectory("t", [Step("o", "a")], 0.0, "failure", info=info), texts)["facts"] == {}


def test_states_are_labelled_in_words(folder):
    data = Run(folder).iteration(1)
    (group,) = data["groups"]
    assert [data["texts"][node["o"]] for node in group["nodes"]] == [state_text(one) for one in episodes()[0].steps]
    assert [len(node["m"]) for node in group["nodes"]] == [2, 1, 6]


def texts_of(browser, selector):
    """The texts of elements in order, those in closed folds too."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
    )


def test_conversations_in_a_browser(folder, browser):
    main([str(folder), "--no-open"])
    opened(browser, (folder / "view.html").as_uri())
    browser.execute_script("showTrajectory(0, 1)")
    roles = [texts_of(browser, f"#panel .step:nth-child({n}) .message .role") for n in (4, 5, 6)]
    assert roles == [
        ["system", "user", "assistant"],
        ["tool search", "assistant"],
        ["system", "user", "assistant", "tool search", "assistant", "tool", "assistant"],
    ]
    folds = texts_of(browser, "#panel .step:nth-child(6) details .role")
    assert folds == ["system", "user", "assistant", "tool search", "assistant"]
    assert "5 earlier messages, rendered again" in texts_of(browser, "#panel .step:nth-child(6) summary")
    state = "{m: [group.nodes[0].m[0], group.nodes[0].m[0]], old: 1}"
    one = browser.execute_script(f"return asked({state}, shown.texts)[0].textContent")
    assert one.startswith("1 earlier message, rendered again")
    assert texts_of(browser, "#panel .step:nth-child(5) .tool pre") == [RESULT["content"]]
    assert texts_of(browser, "#panel .step:nth-child(5) .call") == ['open{"id": 7}']
    assert texts_of(browser, "#panel .step:nth-child(4) .assistant pre") == ["Let me see.", json.dumps(LONG, indent=2)]

    browser.execute_script("showTrajectory(1, 0)")
    assert "KeyError" in texts_of(browser, "#panel .error")[0]
    assert texts_of(browser, "#panel > details") == [
        f"tracebackKeyError: {BAD_TEXT}",
        f"diff--- a/x\n+{SCRIPT}\n",
        'info{"pages": 3}',
    ]
    assert texts_of(browser, "#panel .fact") == [
        "Refused requests, which are no steps: 2.",
        "Fields of its requests that have no effect: temperature, top_p.",
    ]

    browser.execute_script("showNode(1)")
    assert texts_of(browser, "#panel > .message pre") == [RESULT["content"]]
    assert set(texts_of(browser, "#panel tr.action td:first-child")) == {'open({"id": 7})', "No idea."}
    browser.execute_script("showEdge(edgesOf(group)[0])")
    assert texts_of(browser, "#panel > .message .role") == ["system", "user", "tool search"]

    browser.find_element("id", "tab-evaluations").click()
    until(browser, lambda b: texts_of(b, "#episodes .columns.two .message"))
    shared, parting = texts_of(browser, "#episodes .shared .role"), texts_of(browser, "#episodes .parting")
    assert shared == ["system", "user", "assistant"]
    assert parting == ["After 1 shared step they part: the same observation, other actions."]
    assert len(texts_of(browser, "#episodes .fact")) == 2
    assert browser.title == "agent – g2po-trl", "a script in a tool's result is text"
    assert browser.execute_script(
        "return document.querySelectorAll('#panel script, #panel img, #episodes script, #episodes img').length"
    ) == 0  # fmt: skip


def test_a_log_is_no_training_run(tmp_path, browser, capsys):
    from g2po_trl.cli import main as command

    def line(task, reward, *places):
        calls = [{"function": {"name": "go", "arguments": json.dumps({"to": place})}} for place in places]
        turns = [m for one in calls for m in (said(None) | {"tool_calls": [one]}, {"role": "tool", "content": "ok"})]
        return json.dumps({"task_id": task, "reward": reward, "messages": [USER, *turns]})

    log = tmp_path / "runs.jsonl"
    log.write_text("\n".join([line("t", 1, "hall", "mug"), line("t", 0, "cellar"), line("alone", 1, "hall")]))
    command(["credit", str(log)])
    main([str(tmp_path / "runs-credit"), "--no-open"])
    opened(browser, (tmp_path / "runs-credit" / "view.html").as_uri())
    assert browser.title == "runs.jsonl, logged runs – g2po-trl"
    assert browser.find_element("id", "name").text == "Logged runs: runs.jsonl"
    assert "Trained" not in (seen := browser.find_element("tag name", "body").text) and "Iteration" not in seen
    assert browser.find_element("id", "used").text == "Credited with g2po, after the fact: these runs trained nothing."
    for hidden in ("curves", "choose-iteration", "iteration-keys"):
        assert not browser.find_element("id", hidden).is_displayed(), hidden
    browser.execute_script("showNode(0)")
    assert texts_of(browser, "#panel th") == ["action", "times", "A_EP", "A_NC", "A_EC", "advantage", "solved"]
    browser.find_element("id", "theme").click()
    browser.execute_script("showGroup(1)")
    assert "no two episodes with a result" in browser.find_element("id", "panel").text
    browser.execute_script("showNode(0)")
    assert texts_of(browser, "#panel th") == ["action", "times", "solved"]
    assert browser.execute_script("return edgesOf(group).map((edge) => edge.advantage)") == [None]
