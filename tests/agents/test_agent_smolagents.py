"""An agent of smolagents, as its users write it."""

import pytest
from scripted_agents import calls, play

smolagents = pytest.importorskip("smolagents")


@smolagents.tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number.
        b: the other one.
    """
    return a + b


def tool_calling(task, client):
    model = smolagents.OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key)
    return smolagents.ToolCallingAgent([add], model, verbosity_level=0, max_steps=4).run(task["question"]) == "3"


def test_a_tool_calling_agent():
    script = [calls(("add", {"a": 1, "b": 2}), content="I add."), calls(("final_answer", {"answer": "3"}))]
    seen, end = play(tool_calling, script, question="1+2?")
    assert end.reward == 1.0 and end.info == {"ignored_fields": ["tool_choice"]}
    first, second = (one.request for one in seen)
    assert {tool["function"]["name"] for tool in first.tools} == {"add", "final_answer"}
    assert first.stop == ("Observation:", "Calling tools:")
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user"]
    assert "Observation:\n3" in seen[1].text and seen[1].text.startswith("user: ")
    assert seen[0].request.messages == second.messages[:2]
