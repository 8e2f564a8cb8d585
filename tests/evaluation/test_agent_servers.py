"""Odd answers of servers with OpenAI's protocol: a completion all the same, or a line that says why there is none."""

from contextlib import closing
from dataclasses import replace

import pytest
from chat_server import chat_completion, chat_server
from refusals import refused

from g2po_trl.engines.sampling import Sampling
from g2po_trl.evaluation.chat_models import ChatCompletion, ServerChat
from g2po_trl.prompts.conversation import ChatRequest


@pytest.fixture
def ask():
    """`ask(body, status, content_type)`: a server's completion if it answers so. `ask.requests`: what it was asked."""
    pytest.importorskip("openai")

    def asked(body, status=200, content_type="application/json", stop=(), ends=None, times=1):
        server.answer, server.answer_headers = lambda *request: (status, body), {"Content-Type": content_type}
        request = ChatRequest([{"role": "user", "content": "?"}], stop=stop)
        with closing(ServerChat(server.url, "m", max_retries=0)) as chat:
            for _ in range(times):
                generated = chat.runner.run(chat.complete(request, Sampling(stop_sequences=ends), 0))
        return replace(generated, message=None)

    with chat_server(None) as server:
        asked.requests = server.asked
        yield asked


@pytest.mark.parametrize(
    ("body", "status", "content_type"),
    [
        ("<html>Welcome</html>", 200, "text/html"),
        (chat_completion({}) | {"choices": []}, 200, "application/json"),
        (chat_completion(None), 200, "application/json"),
        ({"error": {"message": "'tools[0].function.name': string too long. At most 64."}}, 400, "application/json"),
    ],
)
def test_no_completion_is_one_line(ask, body, status, content_type):
    with refused("base_url"):
        ask(body, status, content_type)


def test_completions_are_read(ask):
    message = {"role": "assistant", "content": "a STOP b", "reasoning_content": "not to STOP yet"}
    assert ask(chat_completion(message), stop=("STOP",)).text == "<think>not to STOP yet</think>a "
    assert ask(chat_completion({"role": "assistant", "content": None}, usage=None)) == ChatCompletion("")
    assert ask(chat_completion("x", None)).complete and not ask(chat_completion("x", "length")).complete


@pytest.mark.parametrize("name", ["stop_reason", "other"])
def test_stop_sequences_are_sent_to_servers_that_name_the_one_they_cut_out(ask, name):
    """As vLLM and SGLang do. Of others nobody would know whether the completion had one."""
    body = chat_completion("<action>go")
    body["choices"][0][name] = "</action>"
    text = ask(body, stop=("STOP",), ends=["</action>"], times=2).text
    sent = [request["stop"] for request in ask.requests]
    if name == "other":
        assert (text, sent) == ("<action>go", [["STOP"], ["STOP"]])
    else:
        assert (text, sent) == ("<action>go</action>", [["STOP"], ["STOP", "</action>"]])
