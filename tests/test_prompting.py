import pytest

from g2po_trl.prompting import PromptTemplate, PromptTooLongError, fit_prompt, parse_plain, parse_think_action


@pytest.mark.parametrize(
    ("reply", "end", "expected"),
    [
        ("<think>a</think><action> Go To Fridge 1 </action>", "", ("go to fridge 1", True)),
        ("<think></think>\n<action>look</action>", "", ("look", True)),
        ("<action>look</action>", "", ("look", False)),
        ("I should</think><action>look</action>", "assistant\n<think>\n", ("look", True)),
        ("I should</think><action>look</action>", "assistant\n", ("look", False)),
        ("<think>看</think><action>look</action>", "", ("look", False)),
        (
            "<think>x</think> take the apple from the big table 1",
            "",
            ("k> take the apple from the big table 1"[-30:], False),
        ),
        ("", "", ("", False)),
        ("<think>x</think><action>one</action><action>two</action>", "", ("one", True)),
    ],
)
def test_think_action(reply, end, expected):
    assert parse_think_action(reply, end) == expected


def test_plain():
    assert parse_plain(" north \n") == ("north", True)
    assert parse_plain("  ") == ("", False)


TEMPLATE = PromptTemplate(
    first="{task}|{observation}|{actions}",
    later="{task}|{steps_taken}|{history_length}|{history}|{current_step}|{observation}|{actions}",
    history_entry="{step}:{observation}>{action}",
    history_separator=";",
    actions_separator=",",
    system="sys",
)


def test_messages():
    assert TEMPLATE.messages("room", "win", ["a", "b"]) == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "win|room|a,b"},
    ]
    later = TEMPLATE.messages("o3", "win", ["a"], history=[("o1", "a1"), ("o2", "a2")], steps_taken=5)
    assert later[-1]["content"] == "win|5|2|4:o1>a1;5:o2>a2|6|o3|a"


def encode(messages):
    text = "".join(message["content"] for message in messages)
    return list(range(len(text))), text  # one token a character


def test_fitting_drops_oldest_history_then_the_middle_of_the_observation():
    arguments = {
        "observation": "0123456789" * 4,
        "task": "TASK",
        "admissible_actions": ["north", "south"],
        "history": [("old" * 5, "a1"), ("new" * 5, "a2")],
        "steps_taken": 2,
    }
    whole = fit_prompt(TEMPLATE, encode, None, **arguments)
    assert not whole.truncated and "oldold" in whole.text and "newnew" in whole.text

    shorter = fit_prompt(TEMPLATE, encode, len(whole.ids) - 1, **arguments)
    assert shorter.truncated and "oldold" not in shorter.text and "newnew" in shorter.text

    shortest = fit_prompt(TEMPLATE, encode, 50, **arguments)
    assert len(shortest.ids) <= 50 and "newnew" not in shortest.text
    assert "TASK" in shortest.text and "north,south" in shortest.text and " … " in shortest.text
    kept = shortest.text.split("|")[5]
    head, tail = kept.split(" … ")
    assert arguments["observation"].startswith(head) and arguments["observation"].endswith(tail)

    with pytest.raises(PromptTooLongError, match="max_prompt_length=10"):
        fit_prompt(TEMPLATE, encode, 10, **arguments)
