"""Histories, prompts within their limit, and what completions are read as."""

import json

import pytest
from refusals import refused

from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT, ALFWORLD_PROMPT, parse_as_released
from g2po_envs.appworld.prompts import parse_think_code
from g2po_envs.webshop.prompts import WEBSHOP_COMPACT_PROMPT, WEBSHOP_PROMPT
from g2po_trl.prompts.template import (
    PromptTemplate,
    fit_prompt,
    last_line,
    parse_plain,
    parse_think_action,
)

OPEN, CLOSED = "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("completion", "end", "expected"),
    [
        ("<think>a</think><action> Go To Fridge 1 </action>", "", ("Go To Fridge 1", True)),
        ("<think></think>\n<action>look</action>", "", ("look", True)),
        ("<action>look</action>", "", ("look", False)),
        ("I should</think><action>look</action>", OPEN, ("look", True)),
        ("<think>I should</think><action>look</action>", OPEN, ("look", True)),
        ("I should</think><action>look</action>", "assistant\n", ("look", False)),
        ("<action>look</action>", OPEN, ("look", False)),
        ("not <action>one</action></think><action>two</action>", "assistant\n", ("two", False)),
        ("<think>看</think><action>去厨房</action>", "", ("去厨房", True)),
        ("<think>x</think> take the apple from table 1", "", ("k> take the apple from table 1", False)),
        ("", "", ("", False)),
        ("<think>x</think><action>one</action><action>two</action>", "", ("one", True)),
        ("<action>look</action>", CLOSED, ("look", True)),
        ("<action>look</action>", "assistant\n<think></think>", ("look", True)),
        ("<think>so</think><action>look</action>", CLOSED, ("look", True)),
        ("<think>could <action>one</action>", CLOSED, ("one", False)),
    ],
)
def test_think_action(completion, end, expected):
    assert parse_think_action(completion, end) == expected


QUOTED = [
    ("<think>not <action>one</action></think><action>two</action>", ""),
    ("not <action>one</action></think>\n<action>two</action>", OPEN),
    ("<think>as <think> </think> <action>one</action></think><action>two</action>", ""),
    ("<think>open <action> and close it</think><action>two</action>", ""),
    ("<think>a</think><action>two</action>\nYou see.\n<think>b</think><action>one</action>", ""),
    ("<think>not </think> <action>one</action>, but</think><action>two</action>", ""),
    ("not </think> <action>one</action>, but</think><action>two</action>", OPEN),
    ("<think>a</think><action>two</action></think>", ""),
]


@pytest.mark.parametrize(("completion", "end"), QUOTED)
def test_an_action_quoted_in_the_thought_is_not_played(completion, end):
    assert parse_think_action(completion, end) == ("two", True)
    assert parse_think_code(completion.replace("action>", "code>"), end) == ("two", True)


@pytest.mark.parametrize(
    ("completion", "end", "expected"),
    [
        ("<think>a</think><action> Go To Fridge 1 </action>", "", ("go to fridge 1", True)),
        ("<think>看</think><action>look</action>", "", ("look", False)),
        ("<action>look</action>", "", ("look", False)),
        ("<action>look</action>", CLOSED, ("look", True)),
        ("so</think><action>look</action>", OPEN, ("look", True)),
        ("<think>not <action>One</action></think><action>two</action>", "", ("one", True)),
        ("</action>look<action> Look </action>", "", ("", False)),
    ],
)
def test_the_rule_of_the_released_code(completion, end, expected):
    """It plays an action quoted in the thought; of what it does not say (templates that open or close it) the rest."""
    assert parse_as_released(completion, end) == expected
    for template in (ALFWORLD_PROMPT, ALFWORLD_COMPACT_PROMPT):
        assert template.read(completion, end, ["Look", "GO TO FRIDGE 1"]) == parse_as_released(completion, end)
    for template in (WEBSHOP_PROMPT, WEBSHOP_COMPACT_PROMPT):
        assert template.read(completion, end, ["Look"]) == parse_as_released(completion, end, 20)


def test_of_completions_without_an_action_their_ends_are_played():
    completion = "Nothing here but an end of words, and MORE"
    assert parse_think_action(completion) == (completion[-30:].strip(), False)
    assert parse_as_released(completion) == (completion[-30:].strip().lower(), False)
    assert WEBSHOP_PROMPT.read(completion).action == completion[-20:].strip().lower()
    assert (parse_plain(" north \n"), parse_plain("  ")) == (("north", True), ("", False))


@pytest.mark.parametrize(
    ("action", "listed", "read"),
    [
        ("buy apple", ["Buy Apple", "Leave"], "Buy Apple"),
        ("STRASSE", ["Straße"], "Straße"),
        ("Search[Red Mug]", ["Buy Apple"], "Search[Red Mug]"),
        ("Look", None, "Look"),
        ("b", ["A", "a", "B"], "B"),
        ("ab", ["AB", "Ab"], "ab"),  # which one was meant is not known
    ],
)
def test_listed_actions_are_matched_regardless_of_case(action, listed, read):
    written, own = f"<think></think><action>{action}</action>", lambda completion, end: (action, True)
    assert PromptTemplate("", "").read(written, "", listed).action == read
    assert PromptTemplate("", "", parse_completion=own).read("", "", listed).action == read
    assert PromptTemplate("", "", match_case=True).read(written, "", listed).action == action


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
    assert "TASK" in shortest.text and "north,south" in shortest.text
    head, tail = shortest.text.split("|")[5].split(" … ")
    assert arguments["observation"].startswith(head) and arguments["observation"].endswith(tail)
    with refused("max_prompt_length"):
        fit_prompt(TEMPLATE, encode, 10, **arguments)


def test_a_parser_that_raises_or_returns_no_text_makes_the_completion_invalid():
    template = PromptTemplate("", "", parse_completion=lambda completion, prompt_end: (json.loads(completion), True))
    with pytest.warns(UserWarning):
        assert [template.read(written) for written in ('"g', "5")] == [('"g', False), ("5", False)]


def test_prompts_show_what_the_template_shows_of_an_observation():
    template = PromptTemplate("{observation}", "{history} | {observation}", show_observation=last_line)
    (first,) = template.messages("map\nhall")
    (later,) = template.messages("map\nattic", history=[("map\nhall", "up")], steps_taken=1)
    assert first["content"] == template.messages("map\nhall")[-1]["content"] == "hall"
    assert later["content"] == "[Observation 1: 'hall', Action 1: 'up'] | attic"
    assert template.turn_message("map\ncellar")["content"] == "cellar"
