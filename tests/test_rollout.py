"""The multi-turn loop, with a scripted model and real environment workers."""

import pytest
from conftest import build_tokenizer
from letter_environment import LETTER_PROMPT, LetterEnvironment
from toy_environments import Countdown

from g2po_trl import EnvironmentPool, PromptTemplate
from g2po_trl.encoding import ChatEncoder
from g2po_trl.generation import Reply
from g2po_trl.prompting import parse_plain
from g2po_trl.rollout import run_episodes

TEMPLATE = PromptTemplate(
    first="{task}|{observation}|{actions}", later="{task}|{history}|{observation}|{actions}", parse_reply=parse_plain
)


@pytest.fixture(scope="module")
def encode():
    return ChatEncoder(build_tokenizer())


def play(
    encode, tasks, environment=Countdown, template=TEMPLATE, max_turns=4, max_prompt_length=None, reply="go<|im_end|>"
):
    calls = []

    def generate(prompts):
        calls.append(prompts)
        return [Reply(encode.tokenizer(reply)["input_ids"], complete=reply.endswith("<|im_end|>")) for _ in prompts]

    with EnvironmentPool(environment, num_workers=2) as pool:
        trajectories, stats = run_episodes(
            pool, generate, encode, template, tasks, [str(i) for i in range(len(tasks))], range(len(tasks)),
            max_turns, 2, max_prompt_length,
        )  # fmt: skip
    return trajectories, stats, calls


def test_only_live_episodes_are_generated_and_stepped(encode):
    trajectories, stats, calls = play(encode, [{"turns": n} for n in (1, 3, 2, 9)])
    assert [len(prompts) for prompts in calls] == [4, 3, 2, 1]
    assert [len(t.steps) for t in trajectories] == [1, 3, 2, 4]
    assert [t.outcome for t in trajectories] == ["success", "success", "success", "truncated"]
    assert [t.reward for t in trajectories] == [10, 10, 10, 0]
    assert stats.live_steps == 10 and stats.active_fraction(4) == 10 / 16
    assert trajectories[1].final_observation == "left 0"


def test_who_says_what_success_is(encode):
    trajectories, _, _ = play(
        encode,
        [
            {"turns": 1, "reward": 0.0},
            {"turns": 1, "reward": 0.5},
            {"turns": 1, "reward": 0.5, "success": False},
            {"turns": 1, "reward": 0.0, "success": True},
            {"turns": 1, "reward": 1.0, "truncates": True},
            {"turns": 1, "reward": 0.5, "success": False, "failure_reason": "own loop: 100 s"},
            {"turns": 1, "reward": 0.0, "failure_reason": "own loop: 100 s", "truncates": True},
        ],
    )
    assert [t.outcome for t in trajectories] == [
        *("failure", "success", "failure", "success", "truncated", "failure", "truncated")
    ]
    assert [t.failure_reason for t in trajectories] == [None] * 5 + ["own loop: 100 s"] * 2
    assert [t.reward for t in trajectories[5:]] == [0.5, 0.0]


def test_steps_hold_what_the_engine_read_and_wrote(encode):
    (trajectory,), _, calls = play(encode, [{"turns": 4}])
    for turn, step in enumerate(trajectory.steps):
        assert step.prompt_ids == calls[turn][0]
        assert step.completion_ids == encode.tokenizer("go<|im_end|>")["input_ids"]
        assert (step.reply, step.action, step.valid) == ("go", "go", True)
        assert (step.observation, step.state_key) == (f"left {4 - turn}", f"k{4 - turn}")
        assert "TASK" in encode.tokenizer.decode(step.prompt_ids), "the task is in every prompt"
    last = encode.tokenizer.decode(trajectory.steps[3].prompt_ids)
    assert "left 3" in last and "left 2" in last and "left 4" not in last, "history_length is 2"


def test_prompts_over_the_limit_are_cut_and_counted(encode):
    (trajectory,), _, calls = play(encode, [{"turns": 4}])
    limit = max(len(prompts[0]) for prompts in calls) - 1
    (cut,), stats, calls = play(encode, [{"turns": 4}], max_prompt_length=limit)
    assert all(len(prompts[0]) <= limit for prompts in calls)
    assert stats.truncated_prompts == sum(step.prompt_truncated for step in cut.steps) > 0
    assert all("TASK" in encode.tokenizer.decode(step.prompt_ids) for step in cut.steps)


def test_a_prompt_that_cannot_fit_ends_its_episode_as_an_error(encode):
    trajectories, _, calls = play(encode, [{"turns": 2}] * 2, max_prompt_length=10)
    assert [t.outcome for t in trajectories] == ["error", "error"]
    assert "max_prompt_length=10" in trajectories[0].error and calls == []


def test_invalid_replies_are_played_all_the_same(encode):
    (trajectory,), _, _ = play(encode, [{"seed": 1}], LetterEnvironment, LETTER_PROMPT, reply="7<|im_end|>")
    assert [step.valid for step in trajectory.steps] == [False, False] and trajectory.outcome == "failure"
