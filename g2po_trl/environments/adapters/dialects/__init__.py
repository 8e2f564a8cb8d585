"""Protocols in which agents ask the model, one file each.

A dialect is a module with these functions. To add one, write the module and a row of `DIALECTS`.

| Function | Returns |
| --- | --- |
| `parse(body: bytes)` | the `AgentRequest` in a request's body; raises `RefusedRequestError` |
| `answer(completion: Completion)` | the response's body |
| `stream(completion: Completion, request: AgentRequest)` | the response's body as server-sent events |
| `error(refusal: RefusedRequestError)` | the body of an error |
"""

from types import ModuleType

from . import chat_completions

DIALECTS: dict[str, ModuleType] = {"/v1/chat/completions": chat_completions}  # by the path that they are asked at
