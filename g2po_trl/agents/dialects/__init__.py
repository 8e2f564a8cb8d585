"""Dialects: protocols in which agents ask the model, one file each.

A dialect is a module with these names. To add a dialect, write the module and add it to `DIALECTS`.

| Name | |
| --- | --- |
| `ROUTES` | "METHOD /path", where `*` is any text -> function of the body |
| `answer(completion, request)` | returns the response, as JSON data |
| `events(answer)` | yields the response as server-sent events, JSON data each |
| `error(refusal)` | returns an error, as JSON data |
| `KEY_HEADER` | header with the key, and what precedes the key in it |
| `VARIABLES` | environment variable of its clients -> attribute of `AgentClient` |

A route's function returns an `AgentRequest`, which is a step, or an answer that needs no model, as JSON data.
"""

from . import chat_completions, generate_content, messages, responses

# The first one's error is what a client gets at an unknown path.
DIALECTS = (chat_completions, responses, messages, generate_content)
KEY_HEADERS = {dialect.KEY_HEADER for dialect in DIALECTS}
VARIABLES = {name: part for dialect in DIALECTS for name, part in dialect.VARIABLES.items()}
ROUTES = {route: (dialect, read) for dialect in DIALECTS for route, read in dialect.ROUTES.items()}
