"""OpenTelemetry's spans as they are exported: each convention and exporter gives the states of chat completions."""

import json

import pytest
from logged_walks import BY_HAND, PATHS, SYSTEM, as_calls, as_parts, conversation

from g2po_trl import g2po
from g2po_trl.report.trace_credit import credit_traces
from g2po_trl.report.traces import trajectories_of_file, trajectories_of_traces

TOOL = {"name": "go", "description": "Go there.", "parameters": {"type": "object", "properties": {}}}
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}


def current(call):
    """Messages of parts, in attributes that are JSON."""
    asked, answered = as_parts(call["messages"]), as_parts([call["response"]])
    return {
        **CHAT,
        "gen_ai.input.messages": json.dumps(asked[1:]),
        "gen_ai.system_instructions": json.dumps(asked[0]["parts"]),
        "gen_ai.output.messages": json.dumps([{**answered[0], "finish_reason": "tool_call"}]),
        "gen_ai.tool.definitions": json.dumps([{"type": "function", **TOOL}]),
    }, []


def as_chat(call):
    """Chat completions in the attributes of the current conventions."""
    return {
        **CHAT,
        "gen_ai.input.messages": json.dumps(call["messages"]),
        "gen_ai.output.messages": json.dumps([call["response"]]),
        "gen_ai.tool.definitions": json.dumps([{"type": "function", "function": TOOL}]),
    }, []


def details(call):
    """The current conventions in an event, which has structured values."""
    attributes = {name: json.loads(value) if "[" in value else value for name, value in current(call)[0].items()}
    return CHAT, [("gen_ai.client.inference.operation.details", attributes)]


def events(call):
    """Up to 1.36."""
    found = []
    for message in call["messages"]:
        named = {"id": message["tool_call_id"]} if message["role"] == "tool" else {}
        calls = {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
        content = {"content": message["content"]} if message["content"] else {}
        found.append((f"gen_ai.{message['role']}.message", {**named, **content, **calls}))
    return CHAT, [*found, ("gen_ai.choice", {"index": 0, "finish_reason": "tool_calls", "message": call["response"]})]


def texts(call):
    """Conventions of 1.27."""
    asked, answered = json.dumps(call["messages"]), json.dumps([call["response"]])
    return CHAT, [
        ("gen_ai.content.prompt", {"gen_ai.prompt": asked}),
        ("gen_ai.content.completion", {"gen_ai.completion": answered}),
    ]


def openllmetry(call):
    attributes = {"llm.request.type": "chat"}
    for side, messages in (("prompt", call["messages"]), ("completion", [call["response"]])):
        for n, message in enumerate(messages):
            at = f"gen_ai.{side}.{n}"
            attributes[f"{at}.role"] = message["role"]
            if message["content"]:
                attributes[f"{at}.content"] = message["content"]
            for m, one in enumerate(message.get("tool_calls", ())):
                flat = {"id": one["id"], **one["function"]}
                attributes |= {f"{at}.tool_calls.{m}.{name}": value for name, value in flat.items()}
            if "tool_call_id" in message:
                attributes[f"{at}.tool_call_id"] = message["tool_call_id"]
    functions = {**TOOL, "parameters": json.dumps(TOOL["parameters"])}
    return attributes | {f"llm.request.functions.0.{name}": value for name, value in functions.items()}, []


def openinference(call):
    attributes = {"openinference.span.kind": "LLM"}
    for side, messages in (("input", call["messages"]), ("output", [call["response"]])):
        for n, message in enumerate(messages):
            at = f"llm.{side}_messages.{n}.message"
            attributes[f"{at}.role"] = message["role"]
            if message["content"]:
                attributes[f"{at}.contents.0.message_content.type"] = "text"
                attributes[f"{at}.contents.0.message_content.text"] = message["content"]
            for m, one in enumerate(message.get("tool_calls", ())):
                inner = f"{at}.tool_calls.{m}.tool_call"
                attributes[f"{inner}.id"] = one["id"]
                attributes |= {f"{inner}.function.{name}": value for name, value in one["function"].items()}
    schema = json.dumps({"type": "function", "function": TOOL})
    return {**attributes, "llm.tools.0.tool.json_schema": schema}, []


CONVENTIONS = {one.__name__: one for one in (current, as_chat, details, events, texts, openllmetry, openinference)}


def value(plain):
    """Return plain data as an OTLP value."""
    if isinstance(plain, list):
        return {"arrayValue": {"values": [value(one) for one in plain]}}
    if isinstance(plain, dict):
        return {"kvlistValue": {"values": pairs(plain)}}
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return {kinds[type(plain)]: str(plain) if type(plain) is int else plain} if plain is not None else {}


def pairs(plain):
    return [{"key": name, "value": value(one)} for name, one in plain.items()]


def otlp(spans):
    """A line for each span, the last first: an exporter writes a span when it ends."""
    for trace, name, parent, start, (attributes, found) in spans:
        span = {"traceId": trace, "spanId": name, "parentSpanId": parent, "name": "chat m"}
        span |= {"startTimeUnixNano": str(start), "attributes": pairs(attributes)}
        span["events"] = [{"name": name, "attributes": pairs(fields)} for name, fields in found]
        resource = {"attributes": pairs({"service.name": "robot"})}
        yield json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {}, "spans": [span]}]}]})


def console(spans):
    """Spans over several lines, as the SDK's console exporter writes them."""
    for trace, name, parent, start, (attributes, found) in spans:
        context = {"trace_id": f"0x{trace}", "span_id": f"0x{name}", "trace_state": "[]"}
        span = {"name": "chat m", "context": context, "parent_id": f"0x{parent}" if parent else None}
        span |= {"start_time": f"2026-11-27T12:00:{start:02}.000000Z", "attributes": attributes}
        span["events"] = [{"name": name, "timestamp": "…", "attributes": fields} for name, fields in found]
        yield json.dumps({**span, "resource": {"attributes": {"service.name": "robot"}}}, indent=4)


def spans(convention, **more):
    """The two walks: each a trace with a span of the episode, and within it those of calls, in the wrong order."""
    for trace, (reward, places) in PATHS.items():
        root = {"gen_ai.operation.name": "invoke_agent", "task_id": "mug", "reward": reward}
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "go"}
        calls = as_calls(conversation(*places))
        for number, call in reversed(list(enumerate(calls))):
            attributes, found = convention(call)
            yield trace, f"{trace}{number}", f"{trace}-root", 2 * number + 1, ({**attributes, **more}, found)
            yield trace, f"{trace}{number}-tool", f"{trace}-root", 2 * number + 2, (tool, [])
        yield trace, f"{trace}-root", "", 0, (root, [])


@pytest.mark.parametrize("exporter", [otlp, console])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_spans_are_the_calls_of_chat_completions(tmp_path, convention, exporter):
    file = tmp_path / "spans.jsonl"
    file.write_text("\n".join(exporter(spans(CONVENTIONS[convention]))))
    traces = trajectories_of_file(file)
    credit = credit_traces(traces, lambda graph: g2po(graph, scale_by_std=False), gamma=0.5)
    assert credit.advantages.tolist() == BY_HAND and not traces.unread
    reasoning = {"messages.reasoning": 6} if convention in ("current", "details") else {}
    assert traces.skipped == reasoning
    has_tools = convention not in ("events", "texts")
    given = {"tools": [{"type": "function", "function": TOOL}]} if has_tools else {}
    chat = [
        {"task_id": "mug", "reward": reward, **given, "messages": conversation(*places)}
        for reward, places in PATHS.values()
    ]
    expected = [step for trajectory in trajectories_of_traces(chat).trajectories for step in trajectory.steps]
    assert [step.key for step in credit.steps] == [step.key for step in expected]
    assert [step.action for step in credit.steps] == [step.action for step in expected]
    assert credit.steps[0].observation == f"system: {SYSTEM['content']}\n\nuser: Find the mug."


def test_contents_that_are_records_of_a_log():
    """The official instrumentations write events as records, which another exporter writes."""
    lines, records = [], []
    for trace, name, parent, start, (attributes, found) in spans(events):
        lines += otlp([(trace, name, parent, start, (attributes, []))])
        for kind, fields in found:
            record = {"traceId": trace, "spanId": name, "eventName": kind, "body": value(fields), "attributes": []}
            records.append(json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}))
    traces = trajectories_of_traces([*lines, *records])
    assert [len(t.steps) for t in traces.trajectories] == [2, 2]
    with pytest.raises(ValueError, match="^line 1: no span has the messages"):
        trajectories_of_traces(lines)
    metrics = json.dumps({"resourceMetrics": []})
    assert len(trajectories_of_traces([metrics, *lines, *records]).trajectories) == 2


def test_contents_that_were_not_captured_are_no_messages():
    def empty(call):
        return CHAT, [(name, {}) for name, _ in events(call)[1]]

    with pytest.raises(ValueError, match="no span has the messages"):
        trajectories_of_traces(otlp(spans(empty)))


def test_a_conversation_is_an_episode_and_results_may_follow():
    """Each call is a trace of its own; tasks and rewards are lines of their own."""
    lines = []
    for name, (_, places) in PATHS.items():
        for number, call in enumerate(as_calls(conversation(*places))):
            attributes, found = current(call)
            attributes["gen_ai.conversation.id"] = name
            lines += otlp([(f"{name}{number}", "s", "", number, (attributes, found))])
    results = [{"task_id": "mug", "episode_id": name, "reward": reward} for name, (reward, _) in PATHS.items()]
    traces = trajectories_of_traces([*lines, *results])
    assert [(t.info["episode"], t.reward, len(t.steps)) for t in traces.trajectories] == [
        ("won", 8, 2),
        ("lost", 0, 2),
    ]
    traces = trajectories_of_traces([*lines, *results[1:]])
    assert traces.skipped["traces without task_id or reward"] == 1 and len(traces.trajectories) == 1
    with pytest.raises(ValueError, match='^line 1: no trace has a task_id and a reward.*"episode_id": "won"'):
        trajectories_of_traces(lines)
    with pytest.raises(ValueError, match="^line 6: reward is 'high'"):
        trajectories_of_traces([*lines, results[0], {**results[1], "reward": "high"}])


def test_episodes_of_one_name_are_not_one():
    """As where each run of a program calls its conversation alike."""
    named = {"gen_ai.conversation.id": "main"}
    lines = [(*one[:4], ({**one[4][0], **named}, one[4][1])) for one in spans(current)]
    with pytest.raises(
        ValueError, match="^line .: the episode 'main' has reward [08] and [80]; give each episode its"
    ):
        trajectories_of_traces(otlp(lines))
    parts = [(*one[:4], ({**one[4][0], "task": one[1]}, one[4][1])) for one in spans(current)]
    assert [t.task_id for t in trajectories_of_traces(otlp(parts)).trajectories] == ["mug", "mug"]


def test_spans_without_an_id_are_calls_and_records_without_a_span_are_counted():
    lines = [json.loads(line) for line in otlp(spans(current))]
    for line in lines:
        del line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"]
    named = [{"traceId": "a", "spanId": "b", "eventName": name} for name in ("gen_ai.choice", "log")]
    lines.append({"resourceLogs": [{"scopeLogs": [{"logRecords": named}]}]})
    traces = trajectories_of_traces(lines)
    assert [len(t.steps) for t in traces.trajectories] == [2, 2]
    assert traces.skipped == {"messages.reasoning": 6, "records without their span": 1}


def test_the_only_evaluation_is_the_reward():
    found = []
    for trace, name, parent, start, (attributes, events) in spans(current):
        if not parent:
            attributes = {"g2po.task_id": "mug"}
            events = [("gen_ai.evaluation.result", {"gen_ai.evaluation.score.value": len(trace)})]
        found.append((trace, name, parent, start, (attributes, events)))
    assert [t.reward for t in trajectories_of_traces(otlp(found)).trajectories] == [3, 4]


def test_a_call_within_a_call_is_the_same_call():
    """Where an agent library and its client are both instrumented."""
    doubled = []
    for span in spans(current):
        trace, name, parent, start, contents = span
        is_call = contents[0].get("gen_ai.operation.name") == "chat"
        doubled += [span, (trace, f"{name}-inner", name, start, contents)] if is_call else [span]
    assert [len(t.steps) for t in trajectories_of_traces(otlp(doubled)).trajectories] == [2, 2]


def test_a_completion_that_was_cut():
    cut = {"gen_ai.response.finish_reasons": ["length"]}
    steps = [step for t in trajectories_of_traces(otlp(spans(current, **cut))).trajectories for step in t.steps]
    assert all(step.completion_truncated for step in steps)


def test_a_part_of_an_unknown_kind_is_skipped():
    def with_picture(call):
        attributes, found = current(call)
        asked = json.loads(attributes["gen_ai.input.messages"])
        asked[0]["parts"].append({"type": "blob", "modality": "image", "content": "…"})
        return {**attributes, "gen_ai.input.messages": json.dumps(asked)}, found

    traces = trajectories_of_traces(otlp(spans(with_picture)))
    assert traces.skipped["messages.blob"] == 4 and [len(t.steps) for t in traces.trajectories] == [2, 2]


@pytest.mark.parametrize("name", ["gen_ai.input.messages", "gen_ai.output.messages"])
def test_messages_that_an_exporter_cut_are_skipped(name):
    lines = list(otlp(spans(current)))
    span = json.loads(lines[0])
    for pair in span["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"]:
        if pair["key"] == name:
            pair["value"]["stringValue"] = pair["value"]["stringValue"][:20]
    traces = trajectories_of_traces([json.dumps(span), *lines[1:]])
    assert traces.skipped["spans without messages"] == 1
    assert [len(t.steps) for t in traces.trajectories] == [1, 2]
