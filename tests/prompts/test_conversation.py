"""Chat requests and responses: one form for what clients send, keys, digests."""

import json

import pytest
from refusals import refused

from g2po_trl.prompts.conversation import (
    ChatRequest,
    ChatResponse,
    as_text,
    normalize_messages,
    prefix_digests,
    since_last_completion,
)
from g2po_trl.prompts.state_keys import request_key

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CONVERSATION = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", **CALL}]},
    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
]


def calling(arguments, **ids):
    return [{**ids, "type": "function", "function": {"name": "f", "arguments": arguments}}]


MADE = {"role": "assistant", "content": ""}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "sent, normal",
    [
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "developer", "content": "be brief"}, {"role": "system", "content": "be brief"}),
        ({"role": "user", "content": PARTS, "audio": None}, {"role": "user", "content": "a\nb"}),
        ({**MADE, "tool_calls": calling('{"a": 1}', id="x")}, {**MADE, "tool_calls": calling({"a": 1}, id="x")}),
        ({**MADE, "tool_calls": calling("{broken")}, {**MADE, "tool_calls": calling("{broken")}),
        ({"role": "user", "content": "\udc00"}, {"role": "user", "content": "?"}),
    ],
)
def test_normalize_messages_of_any_client_gives_one_form(sent, normal):
    assert normalize_messages([sent]) == [normal] == normalize_messages([normal])


def test_results_of_tools_get_the_names_of_their_calls():
    """Clients send ids alone; chat templates and the viewer show names. Ids may be used again."""
    made = [{"id": at, "function": {"name": name, "arguments": "{}"}} for at, name in zip("121", "glo")]
    answered = [{"role": "tool", "tool_call_id": at, "content": ""} for at in "2119"]
    first, then = ({"role": "assistant", "tool_calls": calls} for calls in (made[:2], made[2:]))
    read = normalize_messages([first, *answered[:2], {**answered[2], "name": "own"}, answered[3], then, answered[1]])
    assert [message.get("name") for message in read] == [None, "l", "g", "own", None, None, "o"]
    assert normalize_messages(read) == read


USER = {"role": "user", "content": ""}
REFUSED = {
    "messages": [
        *(None, [], "hello", [5], [USER, {"role": "robot", "content": ""}], [{**USER, "content": 5}]),
        *([{**USER, "content": [part]}] for part in ({"type": "audio"}, {"type": "image", "image": "a.png"})),
        [{"role": "assistant", "function_call": {"name": "go"}}],
        [{**USER, "images": True}],
        *([{"role": "assistant", "tool_calls": calls}] for calls in ({"id": 1}, [{"function": {}}])),
    ],
    "tools": [{}],
    "stop": ["a", [""]],
    "max_tokens": [0, True],
    "shorten": [1],
    "task": [-1],
    "needs_answer": [None],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
def test_what_is_no_request_is_refused_by_its_field(field, value):
    with refused(field):
        ChatRequest(**{"messages": CONVERSATION, field: value})


def test_request_and_response_survive_json():
    request = ChatRequest(normalize_messages(CONVERSATION), [{"type": "function"}], ("\n",), 5, True, 2, True)
    assert ChatRequest(**json.loads(json.dumps(vars(request)))) == request
    response = ChatResponse("three", (CALL,), "tool_calls", 10, 2)
    assert ChatResponse.read(response.to_action()) == response
    assert [ChatResponse.read(text).content for text in ("look", '"three"')] == ["look", '"three"']


def test_request_key_is_what_came_since_the_last_completion():
    assert since_last_completion(CONVERSATION) == CONVERSATION[2:]
    assert since_last_completion(CONVERSATION[:1]) == CONVERSATION[:1]
    other = [*CONVERSATION[:2], {**CONVERSATION[2], "tool_call_id": "call_9"}]
    assert request_key(CONVERSATION) == request_key(other) != request_key(CONVERSATION[:1])
    assert as_text(CONVERSATION) == 'user: 1 + 2?\n\nassistant: add({"a": 1, "b": 2})\n\ntool: 3'


def test_prefix_digests_ignore_ids_of_calls_alone():
    digests = prefix_digests(CONVERSATION)
    assert len(set(digests)) == 4
    renamed = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    assert prefix_digests(renamed) == digests
    changed = [CONVERSATION[0], {**CONVERSATION[1], "content": "hm"}, CONVERSATION[2]]
    assert [a == b for a, b in zip(prefix_digests(changed), digests)] == [True, True, False, False]
    assert not set(prefix_digests(CONVERSATION, [{"name": "add"}])) & set(digests)  # other tools, other prompts


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [({}, True), ({"a": 1}, True), ("{", False), ([1], False), (5, False), ('{"a": 1}', False), ("[" * 200, False)],
)
def test_arguments_that_are_no_object_are_not_valid(arguments, valid):
    request, needing = ChatRequest(CONVERSATION), ChatRequest(CONVERSATION, needs_answer=True)
    answer = {**MADE, "tool_calls": calling({}) + calling(arguments)}
    assert [one.is_valid(answer) for one in (request, needing)] == [valid, valid]
    text = {**MADE, "content": " \n"}
    assert request.is_valid(text) and not needing.is_valid(text) and needing.is_valid({**MADE, "content": "so"})


def test_arguments_are_the_same_in_any_spelling():
    def digest(arguments):
        return prefix_digests([{**MADE, "tool_calls": calling(arguments)}])[1]

    for written, echoed in (("{", "{"), ('{"a": 1}', {"a": 1}), ([1], [1])):
        assert digest(written) == digest(echoed)
    assert len({digest("[" * depth + "]" * depth) for depth in (200, 100_000)}) == 2
