"""The agents of smolagents, as their users write them."""

import pytest
from scripted_agents import calls, play, says

pytest.importorskip("smolagents")


def model_of(client):
    from smolagents import OpenAIServerModel

    return OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key)


def tool_calling(task, client):
    from smolagents import ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number.
            b: the other one.
        """
        return a + b

    return ToolCallingAgent([add], model_of(client), verbosity_level=0, max_steps=4).run(task["question"]) == "3"


def code(task, client):
    from smolagents import CodeAgent

    return CodeAgent([], model_of(client), verbosity_level=0, max_steps=2).run(task["question"]) == "3"


TASK = {"question": "1+2?"}


def test_a_tool_calling_agent():
    script = [calls(("add", {"a": 1, "b": 2}), content="I add."), calls(("final_answer", {"answer": "3"}))]
    seen, end = play(tool_calling, script, **TASK)
    assert end.reward == 1.0 and end.info == {"ignored_fields": ["tool_choice"]}
    first, second = (one.request for one in seen)
    assert {tool["function"]["name"] for tool in first.tools} == {"add", "final_answer"}
    assert first.stop == ("Observation:", "Calling tools:")
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user"]
    assert "Observation:\n3" in seen[1].text and seen[1].text.startswith("user: ")
    assert seen[0].request.messages == second.messages[:2]


def test_a_code_agent():
    steps = [says("Thought: I add.\n<code>\nprint(1 + 2)\n"), says("<code>\nx = 5\n"), says("3")]
    seen, end = play(code, steps, **TASK)
    assert end.reward == 1.0 and end.info == {}
    assert [one.request.stop for one in seen] == [("Observation:", "Calling tools:", "</code>")] * 2 + [()]
    assert all(one.request.tools is None for one in seen) and "Execution logs:\n3" in seen[1].text
