"""The viewer: what it takes from a run, by hand; the page in a real browser; the server on loopback."""

import json
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import numpy as np
import pytest
from run_g2po import outcome
from viewing import BAD_TEXT, panel, served, texts_of, trajectory, until, view, write_run

from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.view import Run, texts


@pytest.fixture
def run(tmp_path):
    """Two iterations. Task one: hall -> a -> won; hall -> b -> a -> won; hall -> b -> lost; one died."""
    group = [trajectory("one", "ha", 10.0), trajectory("one", "hba", 10.0), trajectory("one", "hb", 0.0)]
    group.append(Trajectory("one", [], 0.0, "error", error="exception: boom"))
    other = [trajectory("two", ["x", BAD_TEXT, "x"], 0.0, "truncated"), trajectory("two", "xy", 10.0)]
    facts = {"episode/turns": 2.0, "episode/valid_action_ratio": 1.0, "time/generation": 1.0, "time/update": 2.0}
    log = [{"step": n, "episode/success_rate": 0.25 * n, **facts} for n in (1, 2)]
    evaluations = [{"step": n, "success_rate": 0.1 + 0.25 * n, "success_rate_error": 0.03} for n in (0, 2)]
    settings = {"gamma": 0.5, "advantage_estimator": "g2po", "step_advantage_weight": 1.0, "scale_by_std": False}
    files = dict.fromkeys(("train-000001", "train-000002"), [*group, *other])
    return write_run(tmp_path / "my-run", files, log, evaluations, settings)


def test_values_and_advantages_by_hand(run):
    """gamma 0.5, no division by deviations. Returns: 2.5, 5 | 1.25, 2.5, 5 | 0, 0."""
    data = Run(run).iteration(2)
    first = data["groups"][0]
    assert (first["id"], first["success"], len(first["trajectories"])) == ("one", 2, 4)
    told = {data["texts"][node["o"]]: (node["v"], node["visits"]) for node in first["nodes"]}
    assert told == {"room h": (1.25, 3), "room a": (5.0, 2), "room b": (1.25, 2)}
    steps = [[step["adv"] for step in t["steps"]] for t in first["trajectories"]]
    # A_EP: rewards 10, 10, 0 have mean 20/3. A_NC of the hall: next values 5, 1.25, 1.25 have mean 2.5.
    assert [step[0][:2] for step in steps[:3]] == [[3.3333, 2.5], [3.3333, -1.25], [-6.6667, -1.25]]
    # A_EC: gains 3.75, 5 | 0, 3.75, 5 | 0, -1.25 have mean 16.25 / 7.
    assert [[round(s[2] + 16.25 / 7, 3) for s in t] for t in steps[:3]] == [[3.75, 5], [0, 3.75, 5], [0, -1.25]]
    assert steps[3] == [] and first["trajectories"][3]["error"] == "exception: boom"


def test_advantages_are_shown_as_they_were_trained(make_trainer, tmp_path):
    """Of an estimator that the viewer cannot know, and whose settings it would have to guess."""
    trained = []

    def mine(graph):
        trained.append(np.arange(graph.num_steps) / 8 - 0.5)
        return trained[-1]

    make_trainer(advantage_fn=mine, max_steps=1).train()
    run = Run(tmp_path / "out")
    groups = run.iteration(1)["groups"]
    assert len(groups) == 2 and all(group["stored"] and group["adds_up"] is None for group in groups)
    assert run.about()["settings"]["estimator_name"] == "mine" and "value_lambda" not in run.about()["settings"]
    steps = [step for group in groups for t in group["trajectories"] for step in t["steps"]]
    assert {step["adv"] for step in steps} == {None}
    assert [step["trained"] for step in steps] == np.round(trained[0], 4).tolist()


def test_prompts_and_tokens_are_decoded_where_they_were_recorded(run, monkeypatch):
    """ "é" is of two tokens here: it is one piece, as probable as both together."""
    (run / "tokenizer.json").touch()
    monkeypatch.setattr(texts, "_decoder_in", lambda place: lambda ids: bytes(ids).decode("utf-8", "replace"))
    more = {"completion": "aé!", "completion_ids": list("aé!".encode())}
    first = Step("a", "x", logprobs=[-0.5, -1.0, -0.25, -2.0], prompt_ids=list(b"asked"), **more)
    steps = [first, Step("b", "x", prompt="asked in words", **more), Step("c", "x")]
    write_jsonl(run / "trajectories" / "train-000003.jsonl", [Trajectory("t", steps, 1.0, "success")])
    for prompts, expected in ((True, ["asked", "asked in words", None]), (False, [None] * 3)):
        data = Run(run).iteration(3, prompts)
        shown = data["groups"][0]["trajectories"][0]["steps"]
        assert [None if one["p"] is None else data["texts"][one["p"]] for one in shown] == expected
        pieces = (["a", "é", "!"], [-0.5, -1.25, -2.0]) if prompts else (None, None)
        assert [(one.get("t"), one.get("lp")) for one in shown] == [pieces, *[(None, None)] * 2]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("folder", "my-run alone"),  # success has nothing in common
        ("iterations", "my-run --iterations 7"),
        ("episode", "my-run --text --episode 1.9"),
        ("push_space", "my-run --text --push-space someone/graphs"),
        ("text", "my-run --text --iterations 1 2"),
        ("episode", "my-run --text --episode 3"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, run, monkeypatch, capsys, field, words):
    write_jsonl(tmp_path / "alone" / "trajectories" / "train-000001.jsonl", [trajectory("one", "ha", 10.0)])
    monkeypatch.chdir(tmp_path)
    code, _, errors = outcome(capsys, "view", *words.split(), "--no-open")
    assert code and errors.startswith(f"g2po view: error: {field} ") and not (run / "view.html").exists()


def test_the_server_answers_this_machine_alone(run):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with served(Run(run)) as address:
        assert address.startswith("http://127.0.0.1:")
        overview = json.load(opener.open(f"{address}overview"))
        assert overview["training"] and overview["sources"][0]["iterations"] == [1, 2]
        assert json.load(opener.open(f"{address}iteration-1")) == json.loads(json.dumps(Run(run).iteration(1)))
        assert b"<!doctype html>" in opener.open(address).read()[:20]
        elsewhere = f"http://{urlsplit(address).netloc}"
        for url, host, status in (
            (f"{address}iteration-9", "127.0.0.1", 404),
            (f"{address}../x", "localhost", 404),
            (f"{address}overview", "evil.example", 403),
            *((f"{elsewhere}/{place}", "localhost", 403) for place in ("", "overview", "guessed/overview")),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                opener.open(urllib.request.Request(url, headers={"Host": host}))
            assert error.value.code == status, url


def test_the_page_in_a_browser(run, browser):
    view(browser, run)

    def wait_for(text):
        until(browser, lambda b: text in panel(b))

    def click_node(name):
        browser.find_element("css selector", f"#graph [aria-label^='{name}'] .disc").click()

    assert browser.title == "my-run – g2po-trl"
    assert len(texts_of(browser, "#curves figure")) == 3 and len(texts_of(browser, "#success figure")) == 1
    assert texts_of(browser, "#groups button") == ["1: 2/4", "2: 1/2"]
    assert "Task one" in panel(browser) and "2 of 4 episodes solved; 3 states" in panel(browser)
    # Groups won 2 of 3 and 1 of 2: residuals ±0.2, sqrt(2 * (0.04 + 0.04)) / 5.
    used = "60.0 ± 8.0 % of 5 episodes solved. Trained"
    until(browser, lambda b: texts_of(b, "#used")[0].startswith(used))
    assert "Success in evaluations rose: +50.0 ± 4.2 points." in texts_of(browser, "#diagnosis")[0]
    by_training = browser.execute_script("run.evaluations[0].panel = 1; return diagnosis()")  # 25 and 50 %, ± 8.0
    assert by_training.startswith("Success in training rose: +25.0 ± 11.3 points")

    click_node("state 1:")
    wait_for("State with value 1.25, 3 visits")
    (action,) = browser.find_elements("css selector", "#panel tr.action")
    assert action.text.split() == ["go", "0", "3×", "0.00", "0.00", "−1.07", "−1.07", "2/3"], "means of three visits"
    visits = browser.find_elements("css selector", "#panel tr.visit")
    assert len(visits) == 3 and not visits[0].is_displayed()
    action.click()
    assert visits[0].text == "episode 1, step 1 +3.33 +2.50 +1.43 +7.26 solved"
    visits[0].click()
    wait_for("Episode 1: solved, reward 10")
    assert "room a" in panel(browser) and "the end of ha" in panel(browser)
    assert "State visited 3 times." in panel(browser) and "State visited twice. Few visits" in panel(browser)

    browser.execute_script("showGroup(1)")
    click_node("state 2:")
    wait_for(BAD_TEXT)
    assert texts_of(browser, "#panel b, #panel img") == [], "texts are text"
