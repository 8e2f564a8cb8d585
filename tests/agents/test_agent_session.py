"""Requests whose clients have gone: did a time limit hide the answer, or has the agent ended without it?"""

import math
import socket
from types import SimpleNamespace

import httpx
import pytest
from scripted_agents import ask, says, suppress_all, wait_until

from g2po_trl import AgentEnvironment
from g2po_trl.agents import session
from g2po_trl.agents.dialects.request import AgentRequest
from g2po_trl.agents.session import Call, Session
from g2po_trl.environments.validation import EnvironmentContractError
from g2po_trl.prompts.conversation import ChatRequest, ChatResponse


class Played:
    """A session whose requests come and go at the seconds that a test sets."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(session, "PATIENCE", 2.0)
        self.session, self.clients, self.calls = Session(), {}, {}

    def at(self, second, does, name, **fields):
        self.now = second
        getattr(self, does)(name, **fields)

    def asks(self, name, limit=math.inf):
        client, server = socket.socketpair()
        request = AgentRequest(ChatRequest([{"role": "user", "content": name}]))
        call = Call(request, name.encode(), None, False, [server], self.now + limit, arrived=self.now)
        self.clients[name] = client
        self.calls[name] = self.session.open(call)

    def goes(self, name):
        self.clients[name].close()

    def is_answered(self, name):
        call = self.calls[name]
        self.session.answer(call, ChatResponse("yes"))
        if self.session.delivers(call, call.connections[-1]):
            self.clients[name].close()

    def ends(self, name):
        self.session.leave()


@pytest.mark.parametrize(
    ("happened", "unread"),
    [
        ([(0, "asks", "a"), (1.9, "ends", "")], True),
        ([(0, "asks", "a"), (2.1, "ends", "")], False),
        # A client that says its limit.
        ([(0, "asks", "a", {"limit": 1.0}), (1.1, "ends", "")], False),
        # Another one has waited for longer, and has its answer; or for less.
        ([(0, "asks", "b"), (0.1, "asks", "a"), (9, "is_answered", "b"), (9.05, "ends", "")], True),
        ([(0, "asks", "b"), (0.1, "asks", "a"), (3, "is_answered", "b"), (5.1, "ends", "")], False),
        ([(0, "asks", "b"), (3, "is_answered", "b"), (3.1, "asks", "a"), (6, "ends", "")], False),
        # The agent goes on after its client has gone: with the answer to another request, or with a new one.
        ([(0, "asks", "b"), (0, "asks", "a"), (1, "goes", "a"), (1, "is_answered", "b"), (1, "ends", "")], False),
        ([(0, "asks", "a"), (1, "goes", "a"), (1, "asks", "b"), (1, "is_answered", "b"), (1, "ends", "")], False),
        ([(0, "asks", "a"), (5, "goes", "a"), (6, "is_answered", "a"), (6, "asks", "b"), (6, "ends", "")], False),
        # Asked again.
        ([(0, "asks", "a"), (5, "goes", "a"), (6, "asks", "b"), (6, "asks", "a"), (7, "ends", "")], True),
        ([(0, "asks", "a"), (5, "goes", "a"), (6, "asks", "b"), (6, "asks", "a"), (9, "ends", "")], False),
    ],
)
def test_which_requests_an_agent_leaves_unread(happened, unread, monkeypatch):
    played = Played(monkeypatch)
    for second, does, name, *fields in happened:
        played.at(second, does, name, **dict(*fields))
    assert played.calls["a"].unread is unread


def falls_back(task, client):
    """Goes on without an answer that comes too late, by a client that does not say its time limit."""
    ask(client, "x")
    body, key = {"messages": [{"role": "user", "content": "y"}]}, {"Authorization": f"Bearer {client.api_key}"}
    post = httpx.Client(trust_env=False, timeout=0.3).post
    suppress_all(lambda: post(f"{client.base_url}/chat/completions", json=body, headers=key))
    ask(client, "z")
    return 0.0


@pytest.mark.parametrize("comes", ["before", "after"])
def test_an_answer_that_a_time_limit_hides_is_not_trained_on(comes, monkeypatch):
    """The model takes its time; the agent gets its next answer, and returns at once."""
    monkeypatch.setattr(session, "PATIENCE", 60.0)  # of a machine that is busy
    environment = AgentEnvironment(falls_back, 5)
    environment.reset()
    assert environment.step(says("now")).observation.text == "user: y"
    wait_until(lambda: environment._session.given_up() if comes == "before" else len(environment._session._calls) == 3)
    assert environment.step(says("late")).observation.text == "user: z"
    with pytest.raises(EnvironmentContractError, match="gave up a request before the model's answer and returned 0"):
        environment.step(says("now"))
    environment.close()


def test_the_limit_that_a_client_says_runs_from_before_its_request_is_read():
    """Else one that ends at its limit ends before it, by the time that its request is on the way."""
    calls = []

    def agent(task, client):
        begun = session.time.monotonic()
        model = client.openai(timeout=600.0)
        model.chat.completions.create(model=client.model, messages=[{"role": "user", "content": "x"}])
        calls.extend((call.ends - begun) for call in client.session._calls)
        return 1.0

    environment = AgentEnvironment(agent, 5)
    environment.reset()
    environment.step(says("yes"))
    environment.close()
    assert 0 < calls[0] < 600
