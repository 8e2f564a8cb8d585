"""For tests of the viewer: episodes by hand, and what is done in a browser."""

import base64
import gzip
import json
import re
from contextlib import contextmanager

from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.cli.commands.view import main
from g2po_trl.prompts.conversation import as_text, response_action
from g2po_trl.prompts.state_keys import request_key
from g2po_trl.utils.json import write_json
from g2po_trl.view import Sources
from g2po_trl.view.server import Server

SCRIPT = "<script>document.title = 'taken'</script>"
BAD_TEXT = "</script><b>bold</b> & <img src=x onerror=alert(1)> {braces} ünïcode 日本"


def trajectory(task_id, names, reward, outcome=None, **facts):
    """An episode that was in the rooms of these names, and did `go 0`, `go 1`, … there."""
    steps = []
    for i, name in enumerate(names):
        completion = f"<think></think><action>go {i}</action>"
        steps.append(Step(f"room {name}", f"go {i}", completion=completion, admissible_actions=["go 0"]))
    outcome = outcome or ("success" if reward else "failure")
    return Trajectory(task_id, steps, reward, outcome, f"the end of {names}", **facts)


def evaluated(task_id, names, reward, place, trial=0, last=True, notes=(), **facts):
    """An episode of an evaluation, of this place in its panel."""
    info = {"panel_index": place, "trial": trial, "last_trial": last, "reflections": list(notes)}
    info |= {"prompt_tokens": 90, "completion_tokens": 7}
    return trajectory(task_id, names, reward, None if names else "error", info=info, **facts)


def tool_step(name, kind, given=None):
    """A chat request that is answered by a tool's call; without a name, by a text."""
    answer = called(name, given or {}) if name else {"role": "assistant", "content": "hm"}
    return Step("o", response_action(answer), messages=[{"role": "user", "content": "o"}], call=kind)


SYSTEM = {"role": "system", "content": "You look for books."}
USER = {"role": "user", "content": "Which was the last?"}
LONG = {"limit": 5, "query": "the sea " * 10}  # in the order of their names, as actions have them
RESULT = {"role": "tool", "name": "search", "content": f"{SCRIPT} {BAD_TEXT}"}


def called(name, given, content=""):
    return {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": name, "arguments": given}}]}


SEARCH, OPEN = called("search", LONG, "Let me see."), called("open", {"id": 7})


def conversations():
    """One that searches, opens and answers, its last prompt rendered afresh; one whose agent raises."""

    def step(messages, answer):
        action, key = response_action(answer), request_key(messages)
        return Step(as_text(messages), action, messages=messages, completion="<raw>", state_key=key)

    afresh = [SYSTEM, USER, SEARCH, RESULT, OPEN, {"role": "tool", "content": "The Land"}]
    answers = [{"role": "assistant", "content": text} for text in ("The Land.", "No idea.")]
    good = [step([SYSTEM, USER], SEARCH), step([RESULT], OPEN), step(afresh, answers[0])]
    bad = [step([SYSTEM, USER], SEARCH), step([RESULT], answers[1])]
    for one in (good, bad):
        for taken in one:
            taken.advantage = 0.5 if one is good else -0.5
    info = {"success": False, "traceback": f"KeyError: {BAD_TEXT}", "refused_requests": 2, "pages": 3}
    info |= {"ignored_fields": ["temperature", "top_p"], "diff": f"--- a/x\n+{SCRIPT}\n"}
    return [
        Trajectory("books", good, 10.0, "success", "The agent returned.", task="Find the book"),
        Trajectory("books", bad, 0.0, "failure", failure_reason="agent error: KeyError", info=info),
    ]


def write_run(folder, files, log=(), evaluations=(), trainer=None, **described):
    """Write the folder of a training run: trajectories by the names of their files, and its lists of entries."""
    for name, trajectories in files.items():
        write_jsonl(folder / "trajectories" / f"{name}.jsonl", trajectories)
    for name, entries in (("log", log), ("evaluations", evaluations)):
        if entries:
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in entries))
    write_json(folder / "run.json", {"trainer": trainer or {}, **described})
    return folder


def write_evaluation(folder, *seeds):
    """Write the folder of an evaluation with these seeds, whose last line is not written to its end."""
    for seed, trajectories in enumerate(seeds):
        write_jsonl(folder / "trajectories" / f"reflexion-{seed}.jsonl", trajectories)
    with (folder / "trajectories" / f"reflexion-{len(seeds) - 1}.jsonl").open("a") as file:
        file.write('{"task_id": "four", "steps": [{"obs')
    write_json(folder / "settings.json", {"agent": "reflexion", "panel": "My games", "max_turns": 5, "trials": 2})
    return folder


def data_in(page):
    blocks = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]+)</script>', page.read_text(encoding="utf-8"))
    return {name: gzip.decompress(base64.b64decode(block)).decode() for name, block in blocks}


def texts_of(browser, selector):
    """Return the texts of elements in order, with single spaces; of what is not drawn yet (closed folds), too."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])]"
        ".map((one) => (one.innerText || one.textContent).replace(/\\s+/g, ' ').trim())",
        selector,
    )


def panel(browser):
    return browser.execute_script("return document.getElementById('panel').innerText")


def until(browser, condition, seconds=10):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, seconds, 0.1).until(condition)


def opened(browser, address):
    browser.get(address)
    until(browser, lambda b: b.execute_script("return document.body.dataset.ready") == "yes", 30)


def view(browser, *folders, output=None):
    page = output or folders[0] / "view.html"
    main([*map(str, folders), "--no-open", "--output", str(page)])
    opened(browser, page.as_uri())


@contextmanager
def served(*sources):
    server = Server(Sources(*sources))
    server.start()
    try:
        yield server.address
    finally:
        server.shutdown()


def press(browser, *keys):
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()
