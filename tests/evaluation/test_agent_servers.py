"""Odd answers of servers with OpenAI's protocol: a completion all the same, or a line that says why there is none."""

from dataclasses import replace

import pytest
from chat_server import chat_completion, chat_server
from refusals import refused

from g2po_trl.engines.sampling import Sampling
from g2po_trl.evaluation.chat_models import ChatCompletion, ServerChat
from g2po_trl.prompts.conversation import ChatRequest
from g2po_trl.prompts.template import parse_think_action

THOUGHT, ACTION = "<think>so</think>", "<action>go</action>"


@pytest.fixture
def ask():
    """`ask(body, status, content_type)`: a server's completion if it answers so. `ask.requests`: what it was asked."""
    pytest.importorskip("openai")

    def asked(body, status=200, content_type="application/json", stop=(), ends=None, times=1, **options):
        server.answer, server.answer_headers = lambda *request: (status, body), {"Content-Type": content_type}
        chat = ServerChat(server.url, "m", max_retries=0, **options)
        try:
            request = ChatRequest([{"role": "user", "content": "?"}], stop=stop)
            for _ in range(times):
                generated = chat.runner.run(chat.complete(request, Sampling(stop_sequences=ends), 0))
        finally:
            chat.close()
        return replace(generated, message=None)

    with chat_server(None) as server:
        asked.requests = server.asked
        yield asked


@pytest.mark.parametrize(
    ("body", "status", "content_type"),
    [
        ("<html>Welcome</html>", 200, "text/html"),
        ("<html>Welcome</html>", 200, "application/json"),
        (chat_completion({}) | {"choices": []}, 200, "application/json"),
        (chat_completion(None), 200, "application/json"),
        ("<html>Bad gateway</html>", 502, "text/html"),
        ({"error": {"message": "'tools[0].function.name': string too long. At most 64."}}, 400, "application/json"),
    ],
)
def test_no_completion_is_one_line(ask, body, status, content_type):
    with refused("base_url"):
        ask(body, status, content_type)


def test_an_overflow_is_a_failure_of_the_model(ask):
    for told in (
        "This model's maximum context length is 4096 tokens.",  # vLLM, OpenAI
        "the request exceeds the available context size (4096 tokens)",  # llama.cpp
        "prompt is too long: 204858 tokens > 200000 maximum",  # Anthropic
    ):
        assert told in ask({"error": {"message": told}}, 400).error


@pytest.mark.parametrize(("name", "said"), [("reasoning_content", ""), ("reasoning", ""), ("reasoning", THOUGHT)])
def test_a_thought_that_is_told_apart_is_a_part_of_the_completion(ask, name, said):
    text = ask(chat_completion({"role": "assistant", "content": said + ACTION, name: "so"})).text
    assert text == THOUGHT + ACTION and parse_think_action(text) == ("go", True)


def test_completions_are_read(ask):
    message = {"role": "assistant", "content": "a STOP b", "reasoning_content": "not to STOP yet"}
    assert ask(chat_completion(message), stop=("STOP",)).text == "<think>not to STOP yet</think>a "
    assert ask(chat_completion({"role": "assistant", "content": None}, usage=None)) == ChatCompletion("")
    usage = {"prompt_tokens": None, "completion_tokens": None, "total_tokens": 9}
    assert ask(chat_completion("x", usage=usage)) == ChatCompletion("x")
    assert ask(chat_completion("x", None)).complete and not ask(chat_completion("x", "length")).complete
    ask(chat_completion("x"), generation_kwargs={"typical_p": 0.9})
    assert ask.requests[-1]["typical_p"] == 0.9 and "extra_body" not in ask.requests[-1]


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop", "other"])
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
    body["choices"][0][name] = "STOP"
    assert ask(body, stop=("STOP",), ends=["STOP", "</action>"]).text == "<action>go", "of the request: no part of it"
