"""The endpoint of agents: what of OpenAI's protocol it takes, refuses and ignores, and what is a second request."""

import contextlib
import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest
from scripted_agents import ADD, calls, says, wait_until

from g2po_trl.agents import endpoint, loopback
from g2po_trl.agents.dialects.chat_completions import parse
from g2po_trl.agents.dialects.request import RefusedRequestError
from g2po_trl.agents.endpoint import running_endpoint
from g2po_trl.agents.session import AgentEnd
from g2po_trl.prompts.conversation import ChatResponse

HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def session():
    made = running_endpoint().open_session()
    yield made
    running_endpoint().close_session(made)


def address():
    url = urlsplit(running_endpoint().base_url)
    return url.hostname, url.port


class Asking(threading.Thread):
    """A request in a thread; `result()` is its status and body."""

    def __init__(self, session, body=HELLO, path="/v1/chat/completions", **headers):
        super().__init__(daemon=True)
        self.connection, self.answer = http.client.HTTPConnection(*address()), None
        key = {"Authorization": f"Bearer {session.key}"} if session else {}
        self.given = path, body if isinstance(body, bytes) else json.dumps(body).encode(), {**key, **headers}
        self.start()

    def run(self):
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.connection.request("POST", *self.given)
            response = self.connection.getresponse()
            self.answer = response.status, json.loads(response.read())

    def result(self):
        self.join(30)
        return self.answer

    def refusal(self):
        status, body = self.result()
        return status, body["error"]["code"]

    def id(self):
        return self.result()[1]["id"]

    def hang_up(self):
        self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.join(30)


def respond(session, action):
    call = session.next()
    session.answer(call, ChatResponse.read(action))
    return call


def test_a_completion(session):
    asking = Asking(session)
    assert respond(session, calls(("add", {"ä": [1]}))).request.chat.messages == HELLO["messages"]
    made = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"ä": [1]}'}}]
    message = {"role": "assistant", "content": None, "tool_calls": made}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
    about = {"object": "chat.completion", "created": 0, "model": "policy", "choices": [choice], "usage": usage}
    assert asking.result() == (200, {"id": "chatcmpl-1", **about})
    again = Asking(session)
    respond(session, says("hi", finish_reason="length"))
    status, body = again.result()
    assert (status, body["id"], body["usage"]["total_tokens"]) == (200, "chatcmpl-2", 9)
    message = {"role": "assistant", "content": "hi"}
    assert body["choices"] == [{**choice, "message": message, "finish_reason": "length"}]


def read(**fields):
    return parse(json.dumps({**HELLO, **fields}).encode())


def test_what_a_request_becomes():
    plain = read(n=1, logprobs=False, stop=None, tools=[], response_format={"type": "text"}, user="me", store=False)
    assert (plain.chat.tools, plain.chat.stop, plain.chat.max_tokens, plain.ignored) == (None, (), None, ())
    assert not plain.stream
    assert read(stop="x").chat.stop == ("x",) and read(stop=["Thought:", "y"]).chat.stop == ("Thought:", "y")
    assert read(max_tokens=5).chat.max_tokens == read(max_tokens=9, max_completion_tokens=5).chat.max_tokens == 5
    given = read(tools=[ADD], tool_choice="required", temperature=0, model="gpt-9", frobnicate=1)
    assert given.chat.tools == [ADD] and given.ignored == ("frobnicate", "model", "temperature", "tool_choice")
    assert read(tools=[ADD], tool_choice="auto", parallel_tool_calls=True).ignored == ()
    assert read(tools=[ADD], parallel_tool_calls=False).ignored == ("parallel_tool_calls",)
    without = read(tools=[ADD], tool_choice="none")
    assert without.chat.tools is None and without.ignored == ()
    free = read(response_format={"type": "json_object"})  # messages ask for JSON themselves
    assert free.ignored == ("response_format",) and free.chat == read().chat
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert read(messages=parts).chat.messages == [{"role": "user", "content": "a\nb"}]


def test_a_json_schema_is_asked_for_in_the_system_message():
    schema = {"type": "object", "properties": {"ä": {"type": "string"}}}
    # As openai-agents sends it for an agent with output_type and tools.
    wanted = {"type": "json_schema", "json_schema": {"name": "final_output", "strict": True, "schema": schema}}
    alone = read(tools=[ADD], response_format=wanted)
    asked, *rest = alone.chat.messages
    assert asked["role"] == "system" and asked["content"].endswith(f":\n{json.dumps(schema, ensure_ascii=False)}")
    assert rest == HELLO["messages"] and alone.ignored == ()
    system = {"role": "developer", "content": [{"type": "text", "text": "Add."}]}
    both = read(messages=[system, *HELLO["messages"]], response_format=wanted)
    assert both.chat.messages == [{**asked, "content": f"Add.\n\n{asked['content']}"}, *HELLO["messages"]]


def test_surrogates_and_depth():
    made = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": "\\ud800"}'}}]}
    tool = {"type": "function", "function": {"name": "add", "description": "\udc00"}}
    request = read(messages=[*HELLO["messages"], made], tools=[tool], stop="\ud8ff").chat
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": "?"}
    assert request.tools[0]["function"]["description"] == request.stop[0] == "?"
    nested = "[" * 5000 + "]" * 5000
    made["tool_calls"][0]["function"]["arguments"] = nested  # a text, as a model may write it
    assert read(messages=[made]).chat.messages[0]["tool_calls"][0]["function"]["arguments"] == nested
    with pytest.raises(RefusedRequestError):
        parse(json.dumps({"messages": [made]}).replace(f'"{nested}"', nested).encode())


@pytest.mark.parametrize("body", [b"{", b"\xff", b"", b"[]", b'"x"', b"[" * 100_000, json.dumps({**HELLO, "n": 3})])
def test_a_refused_request_is_no_step(session, body):
    body = body if isinstance(body, bytes) else body.encode()
    assert Asking(session, body).refusal() == (400, "invalid_request")
    again = Asking(session)
    respond(session, says("hi"))
    assert again.id() == "chatcmpl-1" and len(session.refused) == 1


def test_keys_and_paths(session):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {session.key}"}):
        assert Asking(None, **headers).refusal() == (401, "invalid_api_key")
    assert Asking(session, path="/v1/embeddings").refusal() == (404, "unknown_url")
    connection = http.client.HTTPConnection(*address())
    # Of the two keys that a client may send, one is that of the episode.
    keys = {"x-api-key": session.key}, {"Authorization": f"Bearer {session.key}", "x-api-key": "mine"}
    for key, status in ((keys[0], 404), (keys[1], 404), ({}, 401)):
        connection.request("GET", "/v1/models", headers=key)
        answer = connection.getresponse()
        assert answer.status == status and json.loads(answer.read())["error"]["message"]
    assert running_endpoint() is running_endpoint() and session.key not in repr(running_endpoint())


def connected(session, *headers, body=b""):
    """Return a connection on which the head of a request was sent."""
    connection = socket.create_connection(address(), timeout=10)
    key = [f"Authorization: Bearer {session.key}"] if session else []
    head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "Host: x", *key, *headers, "", ""])
    connection.sendall(head.encode() + body)
    return connection


def status_of(connection):
    """Return the status of an answer; `None`: the server closes the connection without one."""
    try:
        status = connection.recv(10_000).split()
    except ConnectionResetError:
        return None
    return int(status[1]) if status else None


def test_a_stranger_costs_little(session, monkeypatch):
    """Without a key no body is read, whatever its length, and the oldest of too many connections is closed."""
    with connected(None, f"Content-Length: {2**26}", body=b"x" * 2**20) as stranger:
        assert status_of(stranger) == 401
    with connected(session, f"Content-Length: {'9' * 5000}") as connection:
        assert status_of(connection) == 400
    with contextlib.suppress(ConnectionError), connected(None, f"Header: {'x' * 2**20}") as stranger:
        assert status_of(stranger) == 400
    monkeypatch.setattr(loopback, "MAX_STRANGERS", 8)
    with contextlib.ExitStack() as opened:
        asking = Asking(session)
        call = session.next()
        silent = [opened.enter_context(socket.create_connection(address(), timeout=10)) for _ in range(20)]
        for _ in range(20):
            opened.enter_context(connected(None, "Content-Length: 9"))
        assert [status_of(one) for one in silent] == [None] * 20
        wait_until(lambda: len(running_endpoint()._server.server_state.connections) <= 9)
        session.answer(call, ChatResponse("one"))
        assert asking.id() == "chatcmpl-1", "a connection with the key stays"


def test_bodies_that_cannot_be_read_are_refused_in_their_session(session, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_BODY_BYTES", 1000)
    assert Asking(session, b" " * 1100).result()[0] == 413 and len(session.refused) == 1


def in_the_session(session, number):
    """Wait until so many requests have arrived."""
    wait_until(lambda: sum(call.clients for call in session._calls) == number)


def test_a_retry_gets_the_same_answer(session):
    asked, again = [Asking(session)], {"x-stainless-retry-count": "1"}
    in_the_session(session, 1)
    asked.append(Asking(session, **again))
    in_the_session(session, 2)
    respond(session, says("one"))
    asked.append(Asking(session, **again))
    assert [one.id() for one in asked] == ["chatcmpl-1"] * 3
    for number, other in enumerate([({}, {"x-stainless-retry-count": "0"}), ({"stop": "x"}, again)], 2):
        asking = Asking(session, {**HELLO, **other[0]}, **other[1])  # the first of the last one was never received
        respond(session, says("more"))
        assert asking.id() == f"chatcmpl-{number}"


@pytest.mark.parametrize("before_its_turn", [False, True])
def test_a_request_whose_client_has_left_is_answered_if_it_comes_again(session, before_its_turn):
    first = Asking(session)
    call = session._events.get() if before_its_turn else session.next()
    first.hang_up()
    wait_until(lambda: not call.clients)
    if before_its_turn:
        session._events.put(call)
        session.end(AgentEnd(1.0))
        assert session.next() == AgentEnd(1.0) and session.unanswered() == 1, "it is not a step"
    again = Asking(session, **{"x-stainless-retry-count": "1"})
    if before_its_turn:
        assert session.next() is call
    in_the_session(session, 1)
    session.answer(call, ChatResponse("one"))
    assert again.id() == "chatcmpl-1" and session.unanswered() == 0


def test_the_end_of_a_session(session):
    closed = []
    session.at_end(lambda: closed.append(1))
    session.at_end(lambda: 1 / 0)
    waiting = Asking(session)
    session.next()
    running_endpoint().close_session(session)
    assert waiting.refusal() == (404, "episode_ended") and closed == [1]
    assert Asking(session).refusal() == (401, "invalid_api_key")
    session.at_end(lambda: closed.append(2))
    assert closed == [1, 2]
