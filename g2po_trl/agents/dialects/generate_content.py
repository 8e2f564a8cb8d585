"""Google's generateContent.

Contents become Anthropic's messages, part by part. Fields of `generationConfig` are read as the request's own.
What a chat template cannot express (thoughts, Google's tools) is left out, and named in `ignored`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from .messages import read_messages
from .request import MODEL, AgentRequest, Completion, LeftOut, demand, function_tool, read_fields

_READ = ("contents", "systemInstruction", "tools", "maxOutputTokens", "stopSequences")
_READ += ("responseMimeType", "responseSchema", "responseJsonSchema")
_REFUSED = {
    "candidateCount": (1, "each request gets one completion: send n requests"),
    "responseLogprobs": (False, "log-probabilities are not returned: leave it out"),
    "responseModalities": (["TEXT"], "only text is generated: leave it out"),
    "cachedContent": (None, "send the contents"),
}
_LEFT_OUT = ("executableCode", "codeExecutionResult", "toolCall", "toolResponse")
_SCHEMAS = ("parameters", "responseSchema")  # of Google's form, with types in capitals
_OF_USER = ("args", "response", "parametersJsonSchema", "responseJsonSchema")  # whose names are the user's
_ERRORS = {401: "UNAUTHENTICATED", 404: "NOT_FOUND"}
KEY_HEADER = ("x-goog-api-key", "")
VARIABLES = {"GEMINI_API_KEY": "api_key", "GEMINI_MODEL": "model", "GOOGLE_GEMINI_BASE_URL": "gemini_url"}


def parse(body: bytes, stream: bool = False) -> AgentRequest:
    """Return the request in a body of `POST …:generateContent`. Raises `RefusedRequestError` for an invalid one."""
    data, ignored = read_fields(body, _READ, _REFUSED, _fields)
    contents, form = data.get("contents"), data.get("responseMimeType", "text/plain")
    demand(isinstance(contents, list), "contents", contents, "give a list of contents")
    messages = [_message(one, f"contents[{index}]", ignored) for index, one in enumerate(contents)]
    system = _message(data.get("systemInstruction", {"parts": []}), "systemInstruction", ignored)["content"]
    messages = read_messages({"system": system, "messages": messages}, ignored)
    tools, names = read_tools(data.get("tools", []), ignored), ("stopSequences", "maxOutputTokens")
    schema = data.get("responseJsonSchema", data.get("responseSchema"))
    kinds = {"text/plain": "text", "application/json": "json_schema" if schema else "json_object"}
    form = {"type": kinds.get(form)} | ({"schema": schema} if schema else {})
    schema = ignored.schema("responseMimeType", {"format": form})
    return AgentRequest.of({**data, "stream": stream}, ignored, messages, tools, *names, schema=schema)


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    data = _plain(data)
    config = data.pop("generationConfig", None) or {}
    demand(isinstance(config, dict), "generationConfig", config, "send a JSON object")
    return data | config


def _plain(data: Any, is_schema: bool = False) -> Any:
    """Return data with names in camel case, as not all of a client's are, and types of schemas in lower case."""
    if isinstance(data, list):
        return [_plain(part, is_schema) for part in data]
    if not isinstance(data, dict):
        return data
    if is_schema:
        lowered = {"type": data["type"].lower()} if isinstance(data.get("type"), str) else {}
        return {name: _plain(part, True) for name, part in data.items()} | lowered
    named = {re.sub("_([a-z])", lambda letter: letter[1].upper(), name): part for name, part in data.items()}
    return {name: part if name in _OF_USER else _plain(part, name in _SCHEMAS) for name, part in named.items()}


def _message(content: Any, where: str, ignored: LeftOut) -> dict[str, Any]:
    """Return the message of Anthropic's form that a content is."""
    parts = content.get("parts") if isinstance(content, dict) else None
    demand(isinstance(parts, list), where, content, "give an object with a list of parts")
    blocks = [_block(part, f"{where}.parts[{index}]", ignored) for index, part in enumerate(parts)]
    role = content.get("role", "user")
    return {"role": "assistant" if role == "model" else role, "content": [block for block in blocks if block]}


def _block(part: Any, where: str, ignored: LeftOut) -> dict[str, Any] | None:
    """Return the block of Anthropic's form that a part is; `None` for one that is left out."""
    part = part if isinstance(part, dict) else {}
    kind = next((name for name in part if name in (*_BLOCKS, *_LEFT_OUT)), "")
    remedy = "give a text, functionCall, functionResponse without parts, or inlineData"
    value = part.get(kind)
    demand(kind == "text" or isinstance(value, dict) and not value.get("parts"), where, part, remedy)
    if kind in _LEFT_OUT or part.get("thought"):
        return ignored.add(f"contents.{kind if kind in _LEFT_OUT else 'thought'}")
    return _BLOCKS[kind](value)


def _result(result: dict[str, Any]) -> dict[str, Any]:
    """Return the block of a function's response: its only value if that is `output` or `result`, else its JSON."""
    response = result.get("response")
    if isinstance(response, dict) and len(response) == 1:
        response = response.get("output", response.get("result", response))
    text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
    return {"type": "tool_result", "tool_use_id": result.get("id"), "name": result.get("name"), "content": text}


def _image(data: dict[str, Any]) -> dict[str, Any]:
    text = str(data.get("data")).replace("-", "+").replace("_", "/")  # some clients write it as for URLs
    return {"type": "image", "source": {"type": "base64", "media_type": data.get("mimeType"), "data": text}}


_BLOCKS = {
    "text": lambda text: {"type": "text", "text": text},
    "functionCall": lambda call: {**call, "type": "tool_use", "input": call.get("args")},
    "functionResponse": _result,
    "inlineData": _image,
}


def read_tools(tools: Any, ignored: LeftOut) -> list[dict[str, Any]]:
    """Return the functions among tools as chat templates take them."""
    functions = []
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        demand(isinstance(tool, dict), f"tools[{index}]", tool, "give an object with functionDeclarations")
        ignored.update(f"tools.{name}" for name in tool if name != "functionDeclarations")
        declared = tool.get("functionDeclarations") or []
        for function in declared if isinstance(declared, list) else [declared]:
            is_json = isinstance(function, dict) and function.get("parametersJsonSchema")
            field = "parametersJsonSchema" if is_json else "parameters"
            functions.append(function_tool(function, f"tools[{index}]", field))
    return functions


def events(written: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield written


def error(refusal: Any) -> dict[str, Any]:
    status = _ERRORS.get(refusal.status, "INVALID_ARGUMENT")
    return {"error": {"code": refusal.status, "message": str(refusal), "status": status}}


def answer(completion: Completion, request: AgentRequest) -> dict[str, Any]:
    response = completion.response
    parts = [{"text": response.content}] if response.content or not response.tool_calls else []
    for id_, name, arguments, _ in completion.calls():
        parts.append({"functionCall": {"id": id_, "name": name, "args": arguments}})
    end = "MAX_TOKENS" if response.finish_reason == "length" else "STOP"
    about = {"modelVersion": MODEL, "responseId": f"resp_{completion.number}"}
    candidates = [{"content": {"role": "model", "parts": parts}, "finishReason": end, "index": 0}]
    usage = completion.usage("promptTokenCount", "candidatesTokenCount", "totalTokenCount")
    return {"candidates": candidates, "usageMetadata": usage, **about}


_OF_MODEL = "POST /v1*/models/*"
ROUTES = {
    f"{_OF_MODEL}:generateContent": parse,
    f"{_OF_MODEL}:streamGenerateContent": partial(parse, stream=True),
    f"{_OF_MODEL}:countTokens": lambda body: {"totalTokens": parse(body).rough_tokens},
}
