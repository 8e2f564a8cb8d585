"""The viewer: what it takes from a run, by hand; the page in a real browser; the server on loopback."""

import json
import socket
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import numpy as np
import pytest
from refusals import refused
from viewing import BAD_TEXT, opened, panel, served, texts_of, trajectory, until, view, write_run

from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.cli.commands.view import main
from g2po_trl.view import Run, texts
from g2po_trl.view.labels import state_labels


@pytest.fixture
def run(tmp_path):
    """Two iterations. Task one: hall -> a -> won; hall -> b -> a -> won; hall -> b -> lost; one died."""
    group = [trajectory("one", "ha", 10.0), trajectory("one", "hba", 10.0), trajectory("one", "hb", 0.0)]
    group.append(Trajectory("one", [], 0.0, "error", error="exception: boom"))
    other = [trajectory("two", ["x", BAD_TEXT, "x"], 0.0, "truncated"), trajectory("two", "xy", 10.0)]
    facts = {"episode/turns": 2.0, "episode/valid_action_ratio": 1.0, "time/generation": 1.0, "time/update": 2.0}
    log = [{"step": n, "episode/success_rate": 0.25 * n, **facts} for n in (1, 2)]
    evaluations = [{"step": 0, "success_rate": 0.1}, {"step": 2, "success_rate": 0.6}]
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
    assert [step[0][0] for step in steps[:3]] == [3.3333, 3.3333, -6.6667]
    assert [step[0][1] for step in steps[:3]] == [2.5, -1.25, -1.25]
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
    data = run.iteration(1)
    groups = data["groups"]
    assert len(groups) == 2 and all(group["stored"] and group["adds_up"] is None for group in groups)
    assert data["value_lambda"] is None
    assert run.about()["settings"]["estimator_name"] == "mine" and "value_lambda" not in run.about()["settings"]
    assert {step["adv"] for group in groups for t in group["trajectories"] for step in t["steps"]} == {None}
    shown = [step["trained"] for group in groups for t in group["trajectories"] for step in t["steps"]]
    assert shown == np.round(trained[0], 4).tolist()


def test_prompts_and_tokens_are_decoded_where_they_were_recorded(run, monkeypatch):
    """ "é" is of two tokens here: it is one piece, as probable as both together."""
    (run / "tokenizer.json").touch()
    monkeypatch.setattr(texts, "_decoder_in", lambda place: lambda ids: bytes(ids).decode("utf-8", "replace"))
    ids, logprobs = list("aé!".encode()), [-0.5, -1.0, -0.25, -2.0]
    steps = [Step("a", "x", completion="aé!", completion_ids=ids, logprobs=logprobs, prompt_ids=list(b"asked"))]
    steps += [Step("b", "x", completion="aé!", completion_ids=ids, prompt="asked in words"), Step("c", "x")]
    write_jsonl(run / "trajectories" / "train-000003.jsonl", [Trajectory("t", steps, 1.0, "success")])
    for prompts, expected in ((True, ["asked", "asked in words", None]), (False, [None] * 3)):
        data = Run(run).iteration(3, prompts)
        shown = data["groups"][0]["trajectories"][0]["steps"]
        assert [None if one["p"] is None else data["texts"][one["p"]] for one in shown] == expected
        assert ["t" in one for one in shown] == [prompts, False, False]
        if prompts:
            assert (shown[0]["t"], shown[0]["lp"]) == (["a", "é", "!"], [-0.5, -1.25, -2.0])


def test_states_are_labelled_by_the_words_that_tell_them_apart():
    seen = {"drawer 1": "nothing", "shelf 2": "a pen 1", "desk 1": "a desklamp 1", "drawer 2": "a pen 2"}
    arrivals = [f"You arrive at {place}. On the {place}, you see {what}." for place, what in seen.items()]
    labels = state_labels([*arrivals, "You take the pen 1.", "", "⬛⬜", "Extraordinarilylongishword"])
    assert labels[:5] == ["drawer 1 nothing", "shelf 2 pen 1", "desk 1 desklamp 1", "drawer 2 pen 2", "take pen 1"]
    assert labels[5:] == ["", "", "Extraordinarilylong…"]
    listings = ["1 def:\n2 go\n3 stop", "1 def:\n2 run\n3 stop", "1 def:\n2 go\n3 halt"]
    assert state_labels(listings) == ["def go stop", "run", "halt"], "numbers of lines tell nothing"
    assert state_labels(["user: You hold a pen."]) == ["hold pen"], "no roles of messages, no small words"

    keys = ["safe, door open", "safe, door shut", "hall"]
    assert state_labels(["safe", "safe", "hall"], keys) == ["safe (open)", "safe (shut)", "hall"], "by their keys"


def test_what_cannot_be_shown_is_refused(tmp_path, run, capsys):
    alone = tmp_path / "alone"
    write_jsonl(alone / "trajectories" / "train-000001.jsonl", [trajectory("one", "ha", 10.0)])
    for field, arguments in (
        ("folder", [tmp_path / "none"]),
        ("folder", [tmp_path]),
        ("iterations", [run, "--iterations", "7"]),
        ("folder", [run, alone]),
    ):
        with refused(field):
            main([*map(str, arguments), "--no-open"])
    for flags in (
        "port --port 8000",
        "iterations --serve --iterations 1",
        "prompts --serve --no-prompts",
        "open --serve --no-open",
        "push_space --text --push-space someone/graphs",
        "text --text --serve",
        "text --text --iterations 1 2",
        "episode --episode 1.1",
        "episode --text --episode 3",
    ):
        field, *flags = flags.split()
        with pytest.raises(SystemExit) as ended:
            main([str(run), *flags])
        assert ended.value.code == 2 and f"error: {field} " in capsys.readouterr().err
    assert not (run / "view.html").exists()


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


# -- in a browser -----------------------------------------------------------------------------------------------------


def click_node(browser, name):
    """A click with the mouse on a state or an end, by the beginning of its label."""
    browser.find_element("css selector", f"#graph [aria-label^='{name}'] .disc").click()


@pytest.mark.parametrize("is_served", [False, True])
def test_the_page_in_a_browser(run, browser, is_served, capsys):
    if is_served:
        with served(Run(run)) as address:
            opened(browser, address)
            use_the_page(browser)
            browser.get("about:blank")  # it asks for no news while the server ends
    else:
        view(browser, run)
        assert "view.html" in capsys.readouterr().out
        use_the_page(browser)


def use_the_page(browser):
    def wait_for(text):
        until(browser, lambda b: text in panel(b))

    assert browser.title == "my-run – g2po-trl"
    assert len(texts_of(browser, "#curves figure")) == 3 and len(texts_of(browser, "#success figure")) == 1
    groups = browser.find_elements("css selector", "#groups button")
    assert [group.text for group in groups] == ["1: 2/4", "2: 1/2"]
    assert "Task one" in panel(browser) and "2 of 4 episodes solved; 3 states" in panel(browser)
    # Groups won 2 of 3 and 1 of 2: residuals ±0.2, sqrt(2 * (0.04 + 0.04)) / 5.
    used = "60.0 ± 8.0 % of 5 episodes solved. Trained"
    until(browser, lambda b: texts_of(b, "#used")[0].startswith(used))
    # Two iterations, 25 and 50 %, each ± 8.0.
    learned = ["Success 10.0 % → 60.0 %", "Success in training rose: +25.0 ± 11.3 points"]
    assert all(text in texts_of(browser, "#diagnosis")[0] for text in learned)

    click_node(browser, "state 1:")
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

    groups[1].click()
    wait_for("Task two")
    click_node(browser, "state 2:")
    wait_for(BAD_TEXT)
    assert texts_of(browser, "#panel b, #panel img") == [], "texts are text"
    browser.execute_script("choose(1)")


def test_a_port_in_use_is_refused(tmp_path):
    write_jsonl(tmp_path / "trajectories" / "train-000001.jsonl", [trajectory("t", "a", 1.0)])
    with socket.create_server(("127.0.0.1", 0)) as server, refused("port"):
        main([str(tmp_path), "--serve", "--port", str(server.getsockname()[1])])
