"""`g2po check`: each finding is found in an environment that has it, and in no other."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import cloudpickle
import programs
import pytest
import vision_models
from letter_environment import LetterEnvironment
from scripted_actors import ScriptedEngine
from tools_by_hand import Safe
from toy_environments import Countdown, Forgetful, KeyDoorEnvironment
from transformers import AutoTokenizer
from vision_models import DrawnLetterEnvironment

from g2po_trl import (
    EnvironmentPool,
    G2POError,
    Observation,
    Player,
    PoolLimits,
    PromptActor,
    PromptTemplate,
    Step,
    StepResult,
    TextEnvironment,
    Trajectory,
)
from g2po_trl.agents.agent import agent_factory
from g2po_trl.check.contract import Finding
from g2po_trl.check.examine import examine, of_several
from g2po_trl.check.findings import call_findings, recurrence_by_key, spelled_words
from g2po_trl.check.play import Played
from g2po_trl.cli.first_prompt import FirstPrompt
from g2po_trl.engines.base import Completion
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.failures import describe_failure
from g2po_trl.environments.pool.pool import EnvironmentFailure
from g2po_trl.environments.tools.trl_tools import played_as
from g2po_trl.prompts.state_keys import workspace_key
from g2po_trl.prompts.tokenization import ChatEncoder

TESTS = Path(__file__).parents[1] / "helpers"


class Walk(TextEnvironment):
    """Left or right on a line of five; the right end pays."""

    def reset(self, seed=0):
        self.at = 2
        return self.observe()

    def observe(self):
        return Observation(f"place {self.at}", admissible_actions=["left", "right"], task="Go right.")

    def step(self, action):
        self.at += {"left": -1, "right": 1}.get(action, 0)
        return StepResult(self.observe(), 10.0 * (self.at == 4), terminated=self.at in (0, 4))


class Remembering(Walk):
    """An observation holds all that was done: no two ways lead to the same state."""

    def reset(self, seed=0):
        self.path = ""
        return self.observe()

    def observe(self):
        return Observation(f"path {self.path}", admissible_actions=["left", "right"], task="Go right.")

    def step(self, action):
        self.path += action[:1]
        return StepResult(self.observe())


class Blind(Walk):
    def observe(self):
        return Observation("dark", admissible_actions=["left", "right"], task="Go right.")


class Processwise(Walk):
    def reset(self, seed=0):
        self.at = 2
        return Observation(f"process {os.getpid()}", task="Go right.")


class Stingy(Walk):
    def step(self, action):
        result = super().step(action)
        return StepResult(result.observation, 0.0, result.terminated)


class Deaf(Walk):
    def observe(self):
        return Observation(f"place {self.at}", admissible_actions=["left", "right", "jump"], task="Go right.")


class Wordy(Walk):
    def observe(self):
        return Observation(f"place {self.at} " + "x" * 9000, admissible_actions=["left", "right"])


class Raising(Walk):
    def step(self, action):
        if self.at == 3:
            raise RuntimeError("stuck")
        return super().step(action)


class Picky(Walk):
    """Takes actions apart as if they were its own, as language models write it."""

    def observe(self):
        return Observation(f"place {self.at}", admissible_actions=["go left 1", "go right 1"], task="Go right.")

    def step(self, action):
        words = action.split(" ")
        number = int(words[-1])
        return super().step(words[1] if number else "left")


class Clock(Walk):
    """Three faults in one: random starts, a reward that is none, and an exception far from the start."""

    def reset(self, seed=0):
        self.started = os.urandom(4).hex()
        return super().reset()

    def observe(self):
        return Observation(f"{self.started} {self.at}", admissible_actions=["left", "right"], task="Go right.")

    def step(self, action):
        if self.at == 3:
            raise RuntimeError("stuck")
        result = super().step(action)
        return StepResult(result.observation, float("nan") if action == "" else 0.0, result.terminated)


class Generous(Walk):
    def step(self, action):
        return StepResult(super().step(action).observation, 10.0, terminated=True)


class Counted(Walk):
    """A walk that numbers its steps."""

    actions = ["left", "right"]

    def reset(self, seed=0):
        self.turn, self.at = 0, 2
        return self.observe()

    def observe(self):
        return Observation(f"[{self.turn}] place {self.at}", admissible_actions=self.actions, task="Go right.")

    def step(self, action):
        self.turn += 1
        return super().step(action)


class CountedSilently(Counted):
    actions = None


class CountedRooms(Counted):
    def observe(self):
        return Observation(
            f"[{self.turn}] room {'abcdef'[self.at]}", admissible_actions=self.actions, task="Go right."
        )


class Pages(Counted):
    """Each page is left by any action: its number is all that tells it apart."""

    def step(self, action):
        self.turn += 1
        return StepResult(self.observe(), 10.0 * (action == "right"), action == "right" or self.turn == 6)


class ListedAtFirst(Walk):
    def step(self, action):
        result = super().step(action)
        return StepResult(result.observation.text, result.reward, result.terminated)


class Locked(Walk):
    def __init__(self):
        import threading

        self.lock = threading.Lock()


def doubts(environment, **options):
    return [finding.text for finding in examine(environment, [{"seed": 0}], **options) if finding.level == "warning"]


def broken(environment, task=None, **options):
    findings = examine(environment, [task or {"seed": 0}], **options)
    return [finding.text for finding in findings if finding.level == "error"]


class Stuck(Walk):
    """Hangs, or dies, where the task says."""

    def reset(self, where):
        self.where = where
        return self.suffer("reset") or super().reset()

    def step(self, action):
        self.suffer(f"step {action}")
        return super().step(action)

    def suffer(self, here):
        if here == self.where:
            time.sleep(60)
        if f"death in {here}" == self.where:
            os._exit(5)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("reset", "in a worker process it times out: Stuck.reset in slot 0 took more than 2 s"),
        ("step no such action", "in a worker process it times out: Stuck.step in slot 1 took more than 2 s"),
        ("step right", "a random episode times out: Stuck.step in slot 0 took more than 2 s"),
        ("death in reset", "in a worker process it crashes: the worker process of Stuck died (exit status 5)"),
    ],
)
def test_what_hangs_or_dies_is_named(where, text):
    """And `check` neither hangs nor dies of it."""
    (found,) = broken(
        Stuck, {"where": where}, limits=PoolLimits(environment_reset_timeout=2, environment_step_timeout=2)
    )
    assert text in found


def test_nothing_is_wrong_with_a_good_environment():
    findings = examine(Walk, [{"seed": 0}, {"seed": 1}])
    assert {finding.level for finding in findings} == {"ok"}
    assert any("there is a graph to learn from" in finding.text for finding in findings)
    assert any("rewards from 0 to 10" in finding.text for finding in findings)
    assert not broken(Locked), "what an environment holds need not travel, only its factory"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (Remembering, "compared with no other"),
        (Blind, "a task has one state only"),
        (Stingy, "all with reward 0"),
        (Deaf, "1 of 3 admissible actions get the same response as an invalid action ('place 2'): 'jump'"),
        (Wordy, "has 9008 characters"),
        (Wordy, "reset gives no Observation.task"),
        (LetterEnvironment, "no admissible actions are listed"),
        (ListedAtFirst, "some observations list admissible actions and others do not"),
    ],
)
def test_doubts(environment, text):
    assert any(text in doubt for doubt in doubts(environment)), doubts(environment)


class Saying(TextEnvironment):
    """A walk that shows nothing but "Saved.", whatever has been done; or where it is."""

    def __init__(self, shown="Saved.", actions=("left", "right")):
        self.shown, self.actions = shown, list(actions) if actions else None

    def reset(self, seed):
        self.at = 3
        return Observation("room 3", admissible_actions=self.actions, task="Walk to room 9.")

    def step(self, action):
        self.at += 1 if action == "right" else -1
        text = self.shown.format(at=self.at) if self.at % 4 else f"a door after room {self.at}"
        return StepResult(
            Observation(text, admissible_actions=self.actions), 10.0 * (self.at == 9), self.at in (-3, 9)
        )


def test_a_short_text_of_many_situations():
    found = doubts(Saying)
    assert any(
        "the short text 'Saved.' is one state in " in text and "leads from it to different" in text for text in found
    )
    assert not any("short text" in text for text in doubts(partial(Saying, "room {at}")))


@pytest.mark.parametrize("environment", [Counted, CountedSilently])
def test_a_step_counter_in_the_keys(environment):
    """Episodes that number their steps alike share states, and none comes back to one."""
    (found,) = [doubt for doubt in doubts(environment) if "if keys had no numbers" in doubt]
    assert "0 % of steps return to a state of their episode, and " in found and "as '[" in found
    assert not any("if keys had no numbers" in doubt for doubt in doubts(Walk)), "a place is no counter"


def test_the_remedy_of_a_step_counter_is_seen():
    assert any("if keys had no numbers, as '[0] room c'" in doubt for doubt in doubts(CountedRooms))
    assert not any("if keys had" in doubt for doubt in doubts(CountedRooms, state_key_ignores=["numbers"]))
    assert not any("if keys had" in doubt for doubt in doubts(Pages)), "without its number a task has one state only"


def test_a_constant_observation_without_listed_actions():
    assert any("observations of the random episodes are the same ('here')" in text for text in doubts(Still))
    assert not any("are the same" in text for text in doubts(partial(Saying, "room {at}", None)))


class Still(TextEnvironment):
    def reset(self, seed):
        return "here"

    def step(self, action):
        return StepResult("here")


def test_a_class_in_trls_style():
    """Tools are called at random, arguments by their types."""
    findings = examine(Safe, [{"code": "1"}], episodes=40, turns=3)
    texts = [finding.text for finding in findings]
    assert {finding.level for finding in findings} <= {"ok", "warning"}, texts
    assert any("rewards from 0 to 10" in text for text in texts), "the digit is found by chance"
    assert not any("no admissible actions" in text for text in texts)

    class Mumbling(Safe):
        def kick(self, where):
            pass

    assert "the tool kick cannot be described" in broken(Mumbling)[0]


def test_whether_states_can_be_returned_to():
    def told(environment):
        findings = examine(environment, [{"turns": 8}], episodes=1)
        return [finding for finding in findings if finding.text.startswith("the same actions")]

    (good,) = told(Countdown)
    assert good.level == "ok"
    (forgetful,) = told(Forgetful)
    assert forgetful.level == "warning" and "before step 8, the observation is 'left 1 at" in forgetful.text


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (Processwise, "in another process: before step 1, the observation"),
        (Raising, "raised RuntimeError: stuck"),
        (lambda: 7, "has no method reset"),
    ],
)
def test_what_is_broken(environment, text):
    (found,) = broken(environment)
    assert text in found


def test_actions_that_are_nearly_admissible():
    """And the line of the user's code is named, not the line of what plays it."""
    source = Path(__file__).read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(source) if "int(words[-1])" in text)
    module = sys.modules[__name__]
    cloudpickle.unregister_pickle_by_value(module)  # pickled by value, code forgets its file
    try:
        found = broken(Picky)
    finally:
        cloudpickle.register_pickle_by_value(module)
    assert any("raised ValueError: invalid literal for int()" in text for text in found)
    assert all(f"{Path(__file__).name}, line {line}" in text for text in found), found


def test_all_is_told_at_once():
    said = "\n".join(broken(Clock))
    for text in ("reset is not deterministic", "reward is nan", "raised RuntimeError: stuck"):
        assert said.count(text) == 1, said


def test_too_easy_is_not_too_hard():
    (doubt,) = [text for text in doubts(Generous) if "succeed in" in text]
    assert "succeed in 8 of 8 episodes" in doubt


def test_training_on_several_environments_learns_if_one_has_something_to_learn():
    won, learns = Finding("warning", "nothing to learn", is_final=True), Finding("ok", "rewards from 0 to 10")
    assert [one.is_final for one in of_several({"a": [won], "b": [learns]}, EpisodeLimits())] == [False, False]
    found = of_several({"a": [won], "b": [learns, won]}, EpisodeLimits())
    assert [(one.text, one.is_final) for one in found] == [
        ("a: nothing to learn", True),
        ("b: rewards from 0 to 10", False),
        ("b: nothing to learn", True),
    ]


def test_a_limit_is_named_where_it_is_set():
    few = Finding("warning", "asks for more", "End the loop earlier, or raise --max-turns.")
    limits = EpisodeLimits(environment_limits={"a": {"max_turns": 2}, "b": {"max_requests": 2}})
    first, second = (one.remedy.partition("raise ")[2] for one in of_several({"a": [few], "b": [few]}, limits))
    assert (first, second) == ("max_turns in environment_limits['a'].", "--max-turns.")


def test_the_first_prompt_is_shown(tiny_model_dir):
    where = "toy_environments.py:KeyDoorEnvironment", "--show", "--task", '{"key_room": "cellar"}'
    shown = run(*where).stdout
    assert shown.startswith("--- user ---\n") and "Observation: " in shown and "Possible actions:\ngo kitchen" in shown
    shown = run(*where, "--model", str(tiny_model_dir)).stdout
    assert shown.startswith("<|im_start|>user\n") and "<|im_start|>assistant\n\n--- " in shown
    assert int(shown.split()[-3]) > 50 and shown.endswith(" tokens ---\n")


def speak(task, client):
    """Asks with a tool."""
    tool = {"type": "function", "function": {"name": "open", "description": "Open it.", "parameters": {}}}
    client.openai().chat.completions.create(
        model=client.model, messages=[{"role": "user", "content": f"door {task['number']}"}], tools=[tool]
    )
    return 1.0


@pytest.mark.parametrize("kind", ["environment", "conversation", "tools", "tools in the window", "agent"])
def test_the_first_prompt_is_the_trainings_to_the_token(tiny_model_dir, kind):
    """Compared with the first step of an episode that the trainer's parts play."""
    template = PromptTemplate("{task}|{observation}", "{observation}") if kind == "tools in the window" else None
    made, task = {
        "environment": (KeyDoorEnvironment, {"key_room": "cellar"}),
        "conversation": (KeyDoorEnvironment, {"key_room": "cellar"}),
        "agent": (agent_factory(speak, 3), {"number": 7}),
    }.get(kind, (Safe, {"code": "12", "prompt": "Open the safe."}))
    settings = {"history": "conversation" if kind == "conversation" else None, "max_prompt_length": 700}
    first = FirstPrompt.of(made, task, 3, template, settings)
    ids, text = first.tokens_for(str(tiny_model_dir))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    factory, wording, history = played_as(made, EpisodeLimits(3), template, settings["history"])
    engine = ScriptedEngine(tokenizer, lambda prompts: [Completion(tokenizer("a")["input_ids"]) for _ in prompts])
    actor = PromptActor(engine, ChatEncoder(tokenizer), wording, history=history, max_prompt_length=700)
    with EnvironmentPool(factory, PoolLimits(1)) as pool:
        ((played,), _) = Player(pool, actor, EpisodeLimits(3)).play([task])
    assert played.steps[0].prompt_ids == ids and len(ids) > 10, played
    if kind in ("tools", "agent"):
        assert "turn" in text if kind == "tools" else "Open it." in text, "the tools are in it"
        assert len(ids) > len(tokenizer.apply_chat_template(first.messages, tokenize=True)), "which a template adds"
    assert first.text(str(tiny_model_dir)).endswith(f"--- {len(ids)} tokens ---")


def test_the_first_prompt_has_its_images(tmp_path, tiny_model_dir):
    model, processor = vision_models.build("Gemma 3")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    first = FirstPrompt.of(DrawnLetterEnvironment, {"seed": 1}, 3)
    ids, _ = first.tokens_for(str(tmp_path))
    wanted, _ = ChatEncoder(processor)(first.messages)
    assert ids == wanted and processor.image_token_id in ids
    assert f"[image {first.episode.observation.images[0]}]" in first.text()
    with pytest.raises(G2POError, match="reads only text"):
        first.tokens_for(str(tiny_model_dir))


def test_tool_calls_of_a_model_are_counted():
    def found(*calls):
        return call_findings([Step("o", "a", call=call) for call in calls])

    assert found(None, None) == []
    (none,) = found("none", "none", "unreadable", "unknown", None)
    assert none.level == "warning" and "trained to call tools" in none.remedy
    assert none.text == "2 of 4 completions call a tool; 1 of these can be parsed, 0 call a known one"
    (good,) = found("known", "known", "none")
    assert good.level == "ok" and good.text.startswith("2 of 3 completions call a tool; 2 of these")


def test_words_that_a_small_tokenizer_spells_are_named(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    known = next(word for word in sorted(tokenizer.get_vocab()) if word.isalpha() and len(word) > 3)
    steps = [Step("zyzzyva", f"qwyjibo {known}", admissible_actions=[f"{known} xylem"])]
    (listed,) = spelled_words(steps, tiny_model_dir)
    assert "spells xylem in pieces" in listed.text and known not in listed.text.partition("spells")[2]
    (played,) = spelled_words(steps, tiny_model_dir, with_actions=True)
    assert "qwyjibo" in played.text and "xylem" in played.text and "zyzzyva" not in played.text
    assert spelled_words(steps, "Qwen/none") == []


def test_a_failure_in_another_process_is_one_line():
    failure = EnvironmentFailure(
        "exception", "Traceback (most recent call last):\n  File x\nRuntimeError: gone\nslot 0, task {}"
    )
    assert describe_failure(failure) == "raised RuntimeError: gone"
    ended = EnvironmentFailure("lost", "Traceback (most recent call last):\n  File x\nOSError: no\nslot 0, task {}")
    assert describe_failure(ended) == "OSError: no"


def run(*arguments):
    return programs.run("-m", "g2po_trl", "check", *arguments, cwd=TESTS)


def test_the_command():
    good = run("toy_environments:KeyDoorEnvironment", "--task", '{"key_room": "hall"}')
    assert good.returncode == 0 and "ok        keeps the contract" in good.stdout
    assert good.stdout.splitlines()[0].startswith("warning   "), "worst first"
    bad = run("letter_environment.py:RaisingEnvironment", "--task", '{"seed": 1}')
    assert bad.returncode == 1 and bad.stdout.startswith("error     ") and "the door is stuck" in bad.stdout
    for arguments, message in (
        (["letter_environment"], "write module:Class"),
        (["nowhere:Environment"], "cannot be loaded"),
        (["letter_environment:Nothing"], "cannot be loaded"),
        (["letter_environment:LetterEnvironment", "--task", "{seed}"], "task is {seed} (Expecting"),
        (["letter_environment:LetterEnvironment", "--task", "[1]"], "task is [1]: write a JSON object"),
        (["letter_environment:LetterEnvironment", "--tasks", "none.jsonl"], "tasks is 'none.jsonl', which cannot be"),
        (["letter_environment:LetterEnvironment", "--episodes", "0"], "episodes is 0"),
        (
            ["letter_environment:LetterEnvironment", "--show", "--prompt", "nix"],
            "write module:TEMPLATE",
        ),
    ):
        failed = run(*arguments)
        assert failed.returncode in (1, 2) and message in failed.stderr and "Traceback" not in failed.stderr
    assert KeyDoorEnvironment.__doc__


def test_states_of_a_workspace_recur_where_their_news_do_not():
    def episode(*seen):
        steps = []
        for number, (files, seconds) in enumerate(seen):
            messages = [{"role": "user", "content": f"call {number} took {seconds}"}]
            steps.append(
                Step(f"user: {messages[0]['content']}", "", state_key=workspace_key(files, messages, None, "/f"))
            )
        return Trajectory("t", steps, 1.0, "success")

    group = [episode(("a", "1.0 s"), ("b", "2.0 s")), episode(("a", "1.1 s"), ("c", "2.1 s"))]
    (found,) = recurrence_by_key(Played([group]), is_own=False)
    assert found.level == "ok" and found.text.endswith(
        "50 % by files and new messages (in use), 0 % by new messages, 100 % by new messages without times, ids, paths"
    )
    assert "by your state key (in use)" in recurrence_by_key(Played([group]), is_own=True)[0].text
    assert recurrence_by_key(Played([group[:1]]), is_own=False) == [], "nothing to compare"


def test_several_environments_are_each_examined_with_their_own_tasks_and_limits():
    from mixed_games import ROWS, Lamp, Shop, speaker

    games = agent_factory({"speaker": speaker}, 9, environment_factory={"lamp": Lamp, "shop": Shop})
    limits = EpisodeLimits(max_tool_calls=2, environment_limits={"speaker": {"max_requests": 1}})
    found = {str(one) for one in examine(games, ROWS[:6], episodes=4, turns=6, episode_limits=limits)}
    assert any("lamp: keeps the contract" in one for one in found), found
    assert any("shop: " in one and "failures by the tool call limit" in one for one in found), found
    told = sorted(one.split(": ")[0].split()[-1] for one in found if "no request offers tools" in one)
    assert told == ["lamp", "speaker"]
    assert any("speaker: 8 of 8 episodes ended as failures by the request limit" in one for one in found), found
    assert not any(one.startswith("error") for one in found)
    (error,) = examine(games, [*ROWS[:3], {"environment": "lamb"}], episodes=2)
    assert error.level == "error" and "'lamb'" in error.text
    (error,) = examine(games, ROWS[:2], episodes=2)
    assert error.level == "error" and "has 'speaker'" in error.text
