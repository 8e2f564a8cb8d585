"""What counts as one state: normalised texts by hand, similar texts, the same on any number of ranks."""

import sys

import pytest
from letter_environment import LongLetterEnvironment
from letter_trainer import played_in
from refusals import refused

from g2po_trl import NormalisedKey, StateGraph, Step, Trajectory
from g2po_trl.credit.assignment import Credit
from g2po_trl.credit.state_keys import (
    keys_of_groups,
    make_state_key,
    merge_similar,
    merge_similar_keys,
    similarity,
    similarity_threshold,
    word_pairs,
)
from g2po_trl.prompts.state_keys import normalised_key, request_key, workspace_key
from g2po_trl.runs.run_json import read_run


def normal(text, **options):
    return NormalisedKey(**options)(Step(text, "go"))


def test_what_a_normalised_key_leaves_out():
    assert normal("Drawer 1  holds 3.5 kg ") == normal("drawer 12 holds 40 kg") == "drawer # holds # kg"
    assert normal("You see 2 Mugs", numbers=True, case=False) == "You see # Mugs"
    assert normal("You see 2 Mugs", numbers=False, case=True) == "you see 2 mugs"
    for text, other in [("The drawer 1 is open.", "The drawer 1 is closed."), ("line\ntwo", "line two")]:
        assert normal(text) != normal(other)


def test_the_environments_own_key_is_normalised_not_the_observation():
    assert NormalisedKey()(Step("nothing happens", "go", state_key="Room 7")) == "room #"
    assert make_state_key(lambda step: step.action * 2, ["case"])(Step("x", "Go 1")) == "go 1go 1"
    assert make_state_key(None, None) is None
    assert make_state_key(None, "case") == make_state_key(None, ["case"]), "as YAML may have it"


def test_similarity_by_hand():
    # pairs: ^a ab bc c$ and ^a ab bd d$: two of six
    assert similarity(word_pairs("a b c"), word_pairs("a b d")) == pytest.approx(2 / 6)
    assert similarity(word_pairs("A b"), word_pairs("a  B")) == 1
    assert similarity(word_pairs(""), word_pairs("")) == 1


LONG = "you are in the kitchen and you see a stove a sink a table and four chairs around it while it rains outside"


def test_requests_to_others_are_not_similar_in_any_normalisation():
    said = [{"role": "assistant", "content": "look"}, {"role": "user", "content": f"{LONG}, a lamp, a cat"}]
    keys = [request_key([{"role": "system", "content": who}, *said]) for who in ("guard", "thief")]
    for details in (set(), {"case"}, {"numbers", "case"}):
        normalise = make_state_key(None, details) or (lambda step: step.key)
        assert len(set(merge_similar([normalise(Step("", "", state_key=key)) for key in keys], 0.5).values())) == 2


def test_texts_that_differ_in_a_word_are_one_state_in_any_order():
    texts = [LONG, LONG.replace("four", "five"), LONG.replace("rains", "snows"), "the cellar is dark", "nothing"]
    merged = merge_similar(texts, 0.7)
    assert len(set(merged.values())) == 3
    assert merged[texts[0]] == merged[texts[1]] == merged[texts[2]] == min(texts[:3])
    assert merge_similar(texts[::-1], 0.7) == merged and merge_similar([], 0.5) == {}


def trajectories_of(*texts):
    return [Trajectory("t", [Step(text, "go") for text in part], 0.0, "failure") for part in texts]


def test_groups_do_not_mix_and_errors_stay_out():
    other = LONG.replace("four", "five")
    played = trajectories_of([LONG], [other], [other])
    played.append(Trajectory("t", [Step(LONG.replace("four", "six"), "go")], 0.0, "error"))
    assert keys_of_groups(played, [0, 0, 1, 1]) == {0: {LONG, other}, 1: {other}}
    merge_similar_keys(played, [0, 0, 1, 1], 0.8)
    representative = min(LONG, other)
    assert [t.steps[0].key for t in played[:3]] == [representative, representative, other]
    assert StateGraph.from_groups([played[:2]]).num_nodes == 1


def test_similar_keys_need_datasketch(monkeypatch):
    assert similarity_threshold("similar") == 0.9
    monkeypatch.setitem(sys.modules, "datasketch", None)
    assert similarity_threshold(None) is None
    with refused("state_key"):
        similarity_threshold("similar")


@pytest.mark.parametrize(
    ("state_key", "ignores", "keys"),
    [
        ("similar:0.5", None, ["Door 3 open a b c"] * 3),
        ("similar:0.6", None, ["door 1 open a b c", "door 2 open a b c", "Door 3 open a b c"]),  # 5 of 9 pairs
        (None, ["numbers"], ["door # open a b c", "door # open a b c", "Door # open a b c"]),
        ("similar:0.6", ["numbers"], ["Door # open a b c"] * 3),
        (lambda step: step.key[:6], ["numbers"], ["door #", "door #", "Door #"]),
    ],
)
def test_details_are_ignored_before_similar_keys_are_merged(state_key, ignores, keys):
    played = trajectories_of([f"{door} open a b c" for door in ("door 1", "door 2", "Door 3")] + ["cellar"])
    Credit(None, 0.95, 1, state_key=state_key, state_key_ignores=ignores).records(played, [0])
    assert [step.key for step in played[0].steps] == [*keys, "cellar"]


@pytest.mark.parametrize(
    ("options", "number", "keys"),
    [({"key_function": lambda step: "anywhere"}, 2, {"anywhere"}), ({"state_key": "similar:0.15"}, 4, {"room 1"})],
    ids=["a function", "similar"],
)
def test_the_users_key_makes_the_nodes(make_trainer, options, number, keys):
    """Two groups, in which plain keys make more nodes."""
    trainer = make_trainer(LongLetterEnvironment, max_steps=1, **options)
    trainer.train()
    assert [entry["graph/nodes"] for entry in trainer.state.log_history if "graph/nodes" in entry] == [number]
    assert {step.state_key for one in played_in(trainer) for step in one.steps} >= keys
    assert read_run(trainer.args.output_dir)["trainer"]["state_key"] == options.get("state_key")


def test_a_normalised_key_of_a_request():
    """What never recurs is no part of it, in the news, the system message and the tools; all else is as by default."""
    tools = [{"type": "function", "function": {"name": "go", "parameters": {"maximum": 1.7976931348623157e308}}}]
    requests = [
        [
            {"role": "system", "content": f"It is 2026-11-{day} 12:00:0{day % 10}."},
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "go", "arguments": {}}}]},
            {"role": "tool", "content": f"/tmp/tmp{day}/a.txt written in 0.{day} s, 3 lines"},
        ]
        for day in (11, 12)
    ]
    one, other = (normalised_key(request, tools) for request in requests)
    assert one == other != normalised_key(requests[0]) and "3 lines" in one
    assert len({request_key(request, tools) for request in requests}) == 2
    plain = [{"role": "user", "content": "Go."}]
    assert normalised_key(plain) == request_key(plain)


@pytest.mark.parametrize(("part", "first"), [("files", "aaaaaa"), ("workspace", "aaccee"), ("messages", "abcdef")])
def test_parts_of_the_key_of_an_agent_with_a_workspace(part, first):
    """Which of six results of a command are one state, each by the first that it equals, in equal files."""
    said = ["exited with code 0:\nok", "<returncode>0<", "exit code 0, Exit Code: 1", '"exit_code": 1', "", "1"]

    def keys_of(files, system):
        asked = ([{"role": "system", "content": system}, {"role": "tool", "content": text}] for text in said)
        steps = [Step("", "", state_key=workspace_key(files, messages, None, "/w")) for messages in asked]
        Credit(None, 1.0, 1, state_key=part).records([Trajectory("t", steps, 0.0, "failure")], [0])
        return [step.key for step in steps]

    keys = keys_of("f", "s")
    assert ["abcdef"[keys.index(key)] for key in keys] == list(first) and not set(keys) & set(keys_of("f", "t"))
    assert (keys_of("g", "s") == keys) is (part == "messages")


def test_keys_with_other_images_are_never_similar():
    pytest.importorskip("datasketch")
    screens = [f"the screen of the shop, with its shelves and goods\n{digit * 32}" for digit in "0123456789"]
    assert set(merge_similar(screens, 0.5).values()) == set(screens)
