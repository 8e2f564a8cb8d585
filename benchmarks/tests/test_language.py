"""The household as text: what is computed of a language model's policy is what playing it gives."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("alfworld")

from benchmarks.credit.exact import Truth, success_rate, transitions
from benchmarks.credit.language_house import HOUSE_PROMPT, HouseEnvironment, text_house
from benchmarks.credit.language_policy import COMPLETION, action_probabilities, policy_of, prompt_numbers
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_envs.tiny.evaluation import play

HOUSE = {"house": 4, "places": 3, "distractors": 0}  # 24 states, 18 prompts
TEMPERATURES = (1.0, 0.4)
_HOT = "You heat the apple 1 using the microwave 1. "
WAY = [
    ("You arrive at coffeemachine 1. On the coffeemachine 1, you see a apple 1.", "take apple 1 from coffeemachine 1"),
    ("You arrive at coffeemachine 1. On the coffeemachine 1, you see nothing.", "go to microwave 1"),
    ("You arrive at microwave 1. The microwave 1 is open. In it, you see nothing.", "heat apple 1 with microwave 1"),
    (f"{_HOT}You arrive at microwave 1. The microwave 1 is open. In it, you see nothing.", "go to countertop 1"),
    (f"{_HOT}You arrive at countertop 1. On the countertop 1, you see nothing.", "move apple 1 to countertop 1"),
]


@pytest.fixture(scope="module")
def model():
    path = str(tiny_model_path())
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def text():
    return text_house(*HOUSE.values())


@pytest.fixture(scope="module")
def tables(model, text):
    return action_probabilities(*model, text, TEMPERATURES)


def one_by_one(model, tokenizer, seen, task, temperature):
    """Probabilities of the admissible actions: each whole completion by a forward pass of its own."""
    messages = HOUSE_PROMPT.messages(seen.text, task, seen.admissible_actions)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found = {}
    for action in seen.admissible_actions:
        first, whole = (tokenizer(of)["input_ids"] for of in (prompt, prompt + COMPLETION.format(action=action)))
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0, len(first) - 1 : -1]
        logps = torch.log_softmax(logits.double() / temperature, dim=-1)
        found[action] = float(logps[range(len(whole) - len(first)), whole[len(first) :]].sum().exp())
    return found


def test_the_shortest_way_in_words(text):
    environment = HouseEnvironment()
    seen = environment.reset(**HOUSE)
    assert seen.task == text.task == "heat some apple and put it in countertop"
    for number, (observation, action) in enumerate(WAY, 1):
        assert seen.text == observation and action in seen.admissible_actions
        nothing = environment.step("take countertop 1 from apple 1")
        assert nothing.observation == seen and not nothing.terminated
        result = environment.step(action)
        seen = result.observation
        assert result.terminated == (number == len(WAY)) and result.reward == 10.0 * result.terminated


def test_prompts_are_as_many_as_what_can_be_seen():
    """By hand: the one object is at one of 8 places or in the hand, done or not, and the agent at one of 8 places."""
    blind, seeing = text_house(0, 8, 0), text_house(0, 8, 0, True)
    assert blind.num_states == seeing.num_states == 8 * 9 * 2
    assert prompt_numbers(seeing).max() + 1 == 8 * 9 * 2
    assert prompt_numbers(blind).max() + 1 == 8 * 3 * 2  # the object is here, in the hand, or neither


def test_the_shortest_way_is_as_probable_as_its_completions(model, text, tables):
    """With just as many turns as it takes, an episode wins by these five completions alone."""
    for temperature, table in zip(TEMPERATURES, tables):
        seen, chance = [o.text for o in map(text.observation, range(text.num_states))], 1.0
        for observation, action in WAY:
            states = [s for s, of in enumerate(seen) if of == observation and action in text.actions(s)]
            chance *= one_by_one(*model, text.observation(states[0]), text.task, temperature)[action]
        assert success_rate(policy_of(text, table, len(WAY))) == pytest.approx(chance, rel=1e-3)
        assert success_rate(policy_of(text, table, len(WAY) - 1)) == 0.0


def test_success_is_the_sum_over_all_episodes(model, text, tables):
    """Enumerates what can happen in six turns by playing the environment; probabilities are computed one by one."""
    known = {}

    def wins(environment, seen, turns):
        if not turns:
            return 0.0
        if seen.state_key not in known:
            known[seen.state_key] = one_by_one(*model, seen, text.task, 0.4)
        chances, total = known[seen.state_key], 0.0
        for action, chance in {**chances, "anything else": 1 - sum(chances.values())}.items():
            result = (after := copy.copy(environment)).step(action)
            total += chance * (1.0 if result.terminated else wins(after, result.observation, turns - 1))
        return total

    environment = HouseEnvironment()
    expected = wins(environment, environment.reset(**HOUSE), 6)
    truth = Truth.from_policy(policy_of(text, tables[1], 6))
    assert truth.success == pytest.approx(expected, rel=1e-3)
    assert np.abs((tables[1] * truth.advantages).sum(axis=2)).max() < 1e-6


def test_episodes_of_the_real_rollout_read_the_prompts_as_often(model, text, tables):
    policy = policy_of(text, tables[0], 7)
    onward, _ = transitions(policy)
    reached = np.eye(text.num_states)[text.house.start]
    by_state = np.zeros(text.num_states)
    for _ in range(policy.turns):
        by_state += reached
        reached = onward.T @ reached
    expected = np.bincount(policy.state_class, by_state)

    episodes = 96
    tasks = [{"task_id": "house", **HOUSE}] * episodes
    played = play(*model, HouseEnvironment, HOUSE_PROMPT, 0, tasks, 1.0, policy.turns, seed=0, batch_size=episodes)
    number = {text.observation(state).state_key: of for state, of in enumerate(policy.state_class)}
    counts = np.zeros((episodes, policy.num_classes))
    for row, trajectory in enumerate(played):
        np.add.at(counts[row], [number[step.state_key] for step in trajectory.steps], 1)
    error = counts.std(axis=0, ddof=1) / np.sqrt(episodes)
    seen = counts.sum(axis=0) > 10
    assert seen.sum() > 3 and (np.abs(counts.mean(axis=0) - expected)[seen] < 4 * error[seen]).all()
    exact = success_rate(policy)
    won = np.mean([trajectory.success for trajectory in played])
    assert won == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / episodes) + 1e-9)
