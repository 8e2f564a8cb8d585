"""OpenTelemetry's GenAI spans in a log, as they are exported: each call of a model is a span.

A line is a batch as the OTLP file exporter writes it (`resourceSpans`; also `resourceLogs`, whose records belong to
spans), or one span, as console exporters write it. The spans of a conversation (`gen_ai.conversation.id`, else of a
trace) are an episode, its calls in the order of their beginnings.

Task and result are not part of the conventions. They are attributes of any of the episode's spans or of its resource,
`task_id`, `reward` and `success`, also with `g2po.` before them, or lines of their own, with the conversation's or the
trace's id as `episode_id`. Without a reward, it is the score of the episode's only evaluation
(`gen_ai.evaluation.result`).
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..utils.show import show
from .log_protocols import Skipped
from .otel_messages import Call, Event, call_of, read_json

_FACTS = ("task_id", "task", "reward", "success")
_CALLS = ("chat", "text_completion", "generate_content")  # values of `gen_ai.operation.name`; others are not calls
_KINDS = {"openinference.span.kind": "llm", "llm.request.type": "chat"}  # what says so in other conventions
_CONVERSATION = "gen_ai.conversation.id"
_BATCHES = ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs", "resourceMetrics", "resource_metrics")
_TRACE = ("traceId", "trace_id", "context.trace_id", "context.traceId", "spanContext.traceId")
_SPAN = ("spanId", "span_id", "context.span_id", "context.spanId", "spanContext.spanId", "id")
_PARENT = ("parentSpanId", "parent_span_id", "parent_id", "parentId", "parentSpanContext.spanId")
_START = ("startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime")
Key = tuple[str, str]  # ids of trace and span


@dataclass
class Span:
    """A span. `line`: its line in the log; `parent`: id of the span that contains it."""

    line: int
    key: Key
    parent: str
    start: float
    attributes: dict[str, Any]
    events: list[Event] = field(default_factory=list)

    def call(self) -> Call | None:
        """Return the call of the span, an empty one without messages; `None` if the span is not a call."""
        operation = self.attributes.get("gen_ai.operation.name")
        kinds = [
            str(self.attributes[name]).lower() == kind for name, kind in _KINDS.items() if name in self.attributes
        ]
        if operation not in (None, *_CALLS) or (operation is None and not all(kinds)):
            return None
        call = call_of(self.attributes, self.events)
        return {} if call is None and (operation or kinds) else call


def is_of_spans(data: Mapping[str, Any]) -> bool:
    """Return whether a line is a batch or a span."""
    return any(name in data for name in _BATCHES) or ("attributes" in data and _first(data, _TRACE) is not None)


class Spans:
    """The spans of a log, in the order of its lines."""

    def __init__(self) -> None:
        self._spans: dict[Key, Span] = {}
        self._records: dict[Key, list[Event]] = defaultdict(list)

    def add(self, number: int, data: Mapping[str, Any]) -> None:
        """Add the spans of a line."""
        if "attributes" in data:
            self._add_span(number, data, {})
        for batch in _objects(data, "resourceSpans", "resource_spans"):
            resource = _resource(batch)
            for scope in _objects(batch, "scopeSpans", "scope_spans", "instrumentationLibrarySpans"):
                for span in _objects(scope, "spans"):
                    self._add_span(number, span, resource)
        for batch in _objects(data, "resourceLogs", "resource_logs"):
            for scope in _objects(batch, "scopeLogs", "scope_logs"):
                for record in _objects(scope, "logRecords", "log_records"):
                    self._records[_key(record)].append(_event(record))

    def _add_span(self, number: int, data: Mapping[str, Any], resource: Mapping[str, Any]) -> None:
        attributes = {**resource, **_resource(data), **_attributes(data.get("attributes"))}
        events = [_event(event) for event in _objects(data, "events")]
        events += [_event(event) for event in _objects({"events": read_json(attributes.get("events"))}, "events")]
        parent, start = str(_first(data, _PARENT) or ""), _nanoseconds(_first(data, _START))
        trace, name = _key(data)
        key = trace, f"without an id: {len(self._spans)}" if _first(data, _SPAN) is None else name
        self._spans[key] = Span(number, key, parent, start, attributes, events)

    def episodes(
        self, results: Mapping[str, Mapping[str, Any]], skipped: Skipped
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield for each episode its first line, and what it is as a line with `calls`.

        Args:
            results: lines with the result of an episode, by its name.
            skipped: counts spans that are skipped.

        Raises:
            ValueError: if no call has messages, or no episode has a task and a reward.
        """
        for key, records in self._records.items():
            if key in self._spans:
                self._spans[key].events += records
            else:
                skipped.update("records without their span" for name, _ in records if name.startswith("gen_ai."))
        calls = {key: call for key, span in self._spans.items() if (call := span.call()) is not None}
        calls = {key: call for key, call in calls.items() if not self._is_within(key, calls)}
        if calls and not any(calls.values()):
            line = min(self._spans[key].line for key in calls)
            raise ValueError(
                f"line {line}: no span has the messages of its call: have the instrumentation capture contents "
                "(OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT), and if it writes them as events, append the "
                "lines of their export"
            )
        known, without = 0, []  # lines and names of episodes that are skipped
        for name, spans in self._by_episode().items():
            own = [calls[span.key] for span in sorted(spans, key=lambda one: one.start) if span.key in calls]
            line = min(span.line for span in spans)
            facts = _facts(spans, results.get(name, {}), f"line {line}: the episode {name!r}")
            skipped.update(["spans without messages"] * own.count({}))
            if any(own) and "reward" in facts and {"task_id", "task"} & facts.keys():
                known += 1
                yield line, {**facts, "id": name, "calls": [call for call in own if call]}
            elif any(own):
                without.append((line, name))
        skipped.update(["traces without task_id or reward"] * len(without))
        if without and not known:
            line, name = min(without)
            example = json.dumps({"task_id": "TASK", "episode_id": name, "reward": 1})
            raise ValueError(
                f"line {line}: no trace has a task_id and a reward: set these attributes on a span of each, or append "
                f"lines such as {example}"
            )

    def _is_within(self, key: Key, calls: Mapping[Key, Call]) -> bool:
        """Return whether a call is part of another one, as if a library and its client are both instrumented."""
        seen, (trace, _) = {key}, key
        above = trace, self._spans[key].parent
        while above in self._spans and above not in seen:
            if calls.get(above):
                return True
            seen.add(above)
            above = trace, self._spans[above].parent
        return False

    def _by_episode(self) -> dict[str, list[Span]]:
        named: dict[str, set[str]] = defaultdict(set)  # the conversations of a trace
        for (trace, _), span in self._spans.items():
            named[trace] |= {str(span.attributes[_CONVERSATION])} if _CONVERSATION in span.attributes else set()
        found: dict[str, list[Span]] = defaultdict(list)
        for (trace, _), span in self._spans.items():
            only = next(iter(named[trace])) if len(named[trace]) == 1 else trace
            found[str(span.attributes.get(_CONVERSATION, only))].append(span)
        return found


def _facts(spans: Sequence[Span], result: Mapping[str, Any], episode: str) -> dict[str, Any]:
    """Return task and result of an episode: in attributes of its spans, in a line of its own, in an evaluation.

    Raises `ValueError`, naming the episode, if its spans have different ones: several episodes have one name.
    """
    facts = {fact: result[fact] for fact in _FACTS if fact in result}
    said = defaultdict(list)
    for span, fact in itertools.product(spans, _FACTS):
        given = next((span.attributes[name] for name in (fact, f"g2po.{fact}") if name in span.attributes), None)
        if given is not None:
            said[fact].append(_number(given) if fact in ("reward", "success") else given)
    for fact, values in said.items():
        other = next((value for value in values if value != values[0]), None)
        is_name = fact != "task" or "task_id" not in {*facts, *said}  # else a span may call its own part a task
        if other is not None and is_name:
            raise ValueError(
                f"{episode} has {fact} {show(values[0])} and {show(other)}; give each episode its own trace or "
                f"{_CONVERSATION}, and one {fact}"
            )
        facts[fact] = values[-1]
    scores = [fields for span in spans for name, fields in span.events if name == "gen_ai.evaluation.result"]
    if "reward" not in facts and len(scores) == 1:
        facts["reward"] = scores[0].get("gen_ai.evaluation.score.value")
    return facts


def _number(value: Any) -> Any:
    """Return the value of a text attribute: some exporters write only texts."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


# --- what exporters write


def _first(data: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of these fields, "a.b" within a."""
    for name in names:
        value: Any = data
        for word in name.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _objects(data: Mapping[str, Any], *names: str) -> list[Mapping[str, Any]]:
    value = _first(data, names)
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _key(data: Mapping[str, Any]) -> Key:
    return str(_first(data, _TRACE)), str(_first(data, _SPAN))


def _resource(data: Mapping[str, Any]) -> dict[str, Any]:
    return _attributes(_first(data, ("resource.attributes",)))


def _event(data: Mapping[str, Any]) -> Event:
    """Return name and fields of an event of a span, of a record of a log, or of an object in an attribute `events`."""
    fields, body = _attributes(data.get("attributes")), _value(data.get("body"))
    fields |= body if isinstance(body, Mapping) else {}
    name = data.get("event.name") or fields.get("event.name") or _first(data, ("eventName", "event_name", "name"))
    return str(name), {**data, **fields} if "event.name" in data else fields


def _attributes(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {str(name): _value(value) for name, value in given.items()}
    pairs = given if isinstance(given, list) else ()
    return {str(one["key"]): _value(one.get("value")) for one in pairs if isinstance(one, Mapping) and "key" in one}


def _value(value: Any) -> Any:
    """Return an OTLP value as plain data; any other value unchanged."""
    if not isinstance(value, Mapping) or len(value) > 1:
        return value
    if not value:  # null
        return None
    ((kind, inner),) = value.items()
    if kind == "arrayValue":
        return [_value(one) for one in _objects({"values": inner}, "values.values")]
    if kind == "kvlistValue":
        return _attributes(_first({"values": inner}, ("values.values",)))
    if kind == "intValue":
        return int(inner) if isinstance(inner, str) else inner  # 64 bits are a text
    return inner if kind in ("stringValue", "boolValue", "doubleValue", "bytesValue") else value


def _nanoseconds(time: Any) -> float:
    """Return the start time of a span; infinity if it is unknown. Only spans of one exporter are compared."""
    try:
        if isinstance(time, (list, tuple)):
            seconds, nanoseconds = time
            return float(seconds) * 1e9 + float(nanoseconds)
        if isinstance(time, str) and not time.isdecimal():
            return datetime.datetime.fromisoformat(time).timestamp() * 1e9
        return float(time)
    except (TypeError, ValueError, OverflowError):
        return math.inf
