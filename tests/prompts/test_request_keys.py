"""State keys of requests: short messages, noise, and who is asked."""

import pytest

from g2po_trl.prompts.state_keys import request_key, without_noise, workspace_key

CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
LONG = "a.py: " + "x" * 64


def talk(*turns):
    messages = [{"role": "user", "content": "Mend it."}]
    for content, result in turns:
        messages += [
            {"role": "assistant", "content": content, "tool_calls": [CALL]},
            {"role": "tool", "content": result},
        ]
    return messages


def files_key(*turns, since=1):
    return workspace_key("files", talk(*turns), None, "/srv/copy", since=since)


@pytest.mark.parametrize("key", [lambda *turns: request_key(talk(*turns)), files_key])
def test_short_messages_are_keyed_with_what_they_answer(key):
    """A thought beside a call is not compared, and a long result says enough."""
    assert key(("", "OK")) == key(("hm", "OK")) == key(("", LONG), ("", "OK"))
    assert len({key(), key(("", "")), key(("", "OK")), key(("", LONG))}) == 4
    assert key(("", LONG)) == key(("", "OK"), ("", LONG))


def test_short_messages_answer_the_models_text():
    asked = [*talk(), {"role": "assistant", "content": "Sure?"}, {"role": "user", "content": "yes"}]
    assert request_key(asked) != request_key([asked[0], {**asked[1], "content": "Pay?"}, asked[2]])


def test_short_messages_say_enough_where_files_have_changed():
    assert files_key(("", "OK"), since=3) == files_key(("", LONG), ("", "OK"), since=5) != files_key(("", "OK"))


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("Chunk ID: d33d44 · Wall time: 0.0000 seconds", "Chunk ID: <id> · Wall time: <seconds>"),
        ("Chunk ID: 131072, Process Group PGID: 22941", "Chunk ID: <id>, Process Group PGID: <id>"),
        ('running with session ID 40213, "pid": 7', 'running with session ID <id>, "pid": <id>'),
        *((kept, kept) for kept in ("paid 22941; rapid: 3", "user id: 7, order_id=22941", "PID: none")),
        ("Fri Nov 27 11:09:32 UTC 2026", "<date>"),
        ("2026-11-27T10:00:00.123Z, 2026-11-27, Nov 27 10:00 TODO", "<date>, <date>, <date> TODO"),  # `ls -l`
        ("3 passed in 0.12s", "3 passed in <seconds>"),
        ('duration_ms: 755, "wall_ms": 12, ms: 3', 'duration_ms: <seconds>, "wall_ms": <seconds>, ms: 3'),
        ("<object at 0x7f3a22>", "<object at <id>>"),
        ("/tmp/abc/x.py:3: error", "<path>:3: error"),
        ("in /srv/copy/a.py", "in ./a.py"),
        ("a.py:12:30: decade, facade 1234567; May 5 apples", "a.py:12:30: decade, facade 1234567; <date> apples"),
        ("see /srv/home/.x, '/srv/tmp/1'", "see <path>, '<path>'"),
    ],
)
def test_what_never_recurs_is_marked(text, marked):
    assert without_noise(text, "/srv/copy", "/srv/") == marked


def test_tools_are_part_of_the_state():
    """Their order does not matter, but every value does, however many other lists of tools were there before."""

    def tools(default, number=3):
        return [{"function": {"name": f"tool{n}", "default": default, "folder": "/tmp/e/work"}} for n in range(number)]

    defaults = (1, True, 1.0, "1", None)
    first = [request_key(talk(), tools(default)) for default in defaults]
    assert len({*first, request_key(talk()), *(request_key(talk(), tools(1, n)) for n in range(4, 40))}) == 42
    assert not any(map(str.isdigit, first[0].split("asked")[1])), "keys may be compared without numbers"
    assert [request_key(talk(), tuple(tools(default)[::-1])) for default in defaults] == first
    marked = {workspace_key("f", talk(), tools(1), f"/tmp/{name}/work", f"/tmp/{name}") for name in "ef"}
    assert len(marked) == 2, "one episode's folder is the other's temporary path"


def test_who_is_asked_is_part_of_the_state():
    news = [{"role": "user", "content": "ok"}]
    quoted = [{"type": "function", "function": {"name": "run", "description": f'`cat "/tmp/{n}"`'}} for n in "ab"]
    told = [
        [{"role": "system", "content": f"Today is {day}"}] for day in ("2026-11-27, in /srv/copy", "2027-01-01, in .")
    ]
    asked = [([], None), ([], quoted[:1]), ([], quoted[1:]), (told[0], None), (told[1], None)]
    keys = [workspace_key("files", [*system, *news], tools, "/srv/copy") for system, tools in asked]
    assert len(set(keys)) == 3 and keys[1] == keys[2] and keys[3] == keys[4]
