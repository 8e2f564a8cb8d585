"""The shipped tiny models: that they load, write what they should, and are made the same way twice."""

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

pytest.importorskip("alfworld")

from functools import partial

from tiny_models import exam_of

from g2po_envs.alfworld import games
from g2po_envs.alfworld.augmentation import ROLES, TYPE_NAMES, augment
from g2po_envs.alfworld.demonstrations import TOOLS, Expert, Goal, House, LimitedExpert, demonstrate
from g2po_envs.alfworld.make_tiny_model import COURSE, make_demonstrations, make_tokenizer
from g2po_envs.alfworld.prompts import ALFWORLD_COMPACT_PROMPT
from g2po_envs.alfworld.tiny import HISTORY_LENGTH, tiny_environment, tiny_model_path
from g2po_envs.tiny.training import Phase, Recipe, teach


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return games.generate_games(tmp_path_factory.mktemp("games") / "held-out", "held-out", 18, seed=7, size="tiny")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model_path())


def test_files_are_small_and_safe():
    names = {path.name for path in tiny_model_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert (tiny_model_path() / "model.safetensors").stat().st_size <= 4_000_000


def test_names_and_numbers_are_one_token(tokenizer):
    for text in [f" {name}" for name in TYPE_NAMES] + [f" {number}" for number in range(1, 21)]:
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1, text


@pytest.mark.parametrize("text", ["You arrive at shelf 1. In it, you see a cd 1.", "Zürich\n\n  日本 'quoted' 1234"])
def test_tokenizer_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_tags_survive_decoding_and_padding_is_not_the_end(tokenizer):
    completion = "<think></think><action>go to fridge 1</action>"
    ids = tokenizer(completion + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == completion
    assert len(ids) <= 14 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.padding_side == "left" and tokenizer.pad_token_id != tokenizer.eos_token_id


def test_completions_are_well_formed_and_admissible(one_thread, held_out):
    environment, template = partial(tiny_environment, held_out), ALFWORLD_COMPACT_PROMPT
    summary = exam_of(tiny_model_path(), environment, held_out.rows(), template, HISTORY_LENGTH, max_turns=15)
    assert summary["valid_action_ratio"] >= 0.95, summary
    assert summary["admissible_action_ratio"] >= 0.6, summary  # its README says 0.71
    assert 0 < summary["success_rate"] < 0.8, summary


def test_expert_wins_every_kind_of_game(held_out):
    environment = tiny_environment(held_out)
    for row in held_out.rows():
        house = House.scout(environment, row)
        now = environment.reset(**row)
        expert = Expert(Goal.from_task(now.task), random.Random(0))
        for _ in range(20):
            action = expert.act(house, now.admissible_actions)
            assert action in now.admissible_actions
            house.apply(action)
            result = environment.step(action)
            now = result.observation
            if result.terminated:
                break
        assert result.info["success"], (row, now)


def test_limited_expert_does_not_know_the_tools(held_out):
    environment, rows = tiny_environment(held_out), held_out.rows()
    of_tools = [row for row in rows if any(f"pick_{verb}_" in row["task_type"] for verb in TOOLS)]
    shown = {kind: demonstrate(environment, of_tools, 3, 0, expert_class=kind) for kind in (Expert, LimitedExpert)}

    def answers(demonstrations):
        """First words of what is answered with an object in hand, where a tool can be used on it."""
        using = lambda d: [a for a in d.actions if a.split(" ")[0] in TOOLS]  # noqa: E731
        return Counter(d.expert.split(" ")[0] in TOOLS for d in demonstrations if using(d))

    knows, limited = (answers(demonstrations) for demonstrations in shown.values())
    assert all(d.expert in d.actions for demonstrations in shown.values() for d in demonstrations)
    assert sum(limited.values()) > 50 and 0.2 < limited[True] / sum(limited.values()) < 0.6
    # It uses a tool that is not the task's, too, and the expert never does.
    wrong = {
        kind: [d for d in some if (word := d.expert.split(" ")[0]) in TOOLS and word != Goal.from_task(d.task).verb]
        for kind, some in shown.items()
    }
    assert wrong[LimitedExpert] and not wrong[Expert] and knows[True]


def test_walks_that_try_the_impossible_show_the_way_out(held_out):
    shown = demonstrate(tiny_environment(held_out), held_out.rows()[:6], 2, 0, impossible=0.3)
    failed = [d for d in shown if d.observation == "Nothing happens."]
    assert len(failed) > len(shown) / 10
    assert all(d.expert in d.actions and d.expert != d.history[-1][1] for d in failed)
    assert not any(
        d.observation == "Nothing happens." for d in demonstrate(tiny_environment(held_out), held_out.rows()[:2], 2, 0)
    )


def test_renaming_is_consistent_and_keeps_roles(held_out):
    for number, shown in enumerate(demonstrate(tiny_environment(held_out), held_out.rows()[:6], 1, seed=0)):
        other = augment(shown, random.Random(number), keep_names=0.0)
        assert other.expert in other.actions
        words, renamed = (re.findall(r"[a-z]+", d.task + " " + d.observation) for d in (shown, other))
        pairs = set(zip(words, renamed))
        assert len(words) == len(renamed) and len(pairs) == len(dict(pairs))
        assert all(new == old for old, new in pairs if old in ROLES or old not in TYPE_NAMES)


def test_making_is_deterministic(one_thread, tmp_path):
    """The pipeline at a very reduced scale, twice: same tokenizer, same weights, same completions."""
    recipe = Recipe(
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        batch_size=8,
        bf16=False,
        phases=(Phase("read", 4, 1e-3, whole_sequence=True), Phase("loosen", 3, 1e-3, noise=0.3)),
    )
    made = []
    for attempt in ("once", "again"):
        shown = make_demonstrations(tmp_path / attempt, num_games=12)
        model, tokenizer = teach(COURSE, shown, make_tokenizer, recipe, seed=3)
        made.append((shown, json.dumps(tokenizer.get_vocab(), sort_keys=True), model.state_dict(), tokenizer, model))
    (shown, vocab, weights, tokenizer, model), (shown2, vocab2, weights2, _, _) = made
    assert shown == shown2 and vocab == vocab2
    assert all(torch.equal(weights[name], weights2[name]) for name in weights)
    # Another seed is another model, so that the comparison above says something.
    other, _ = teach(COURSE, shown, make_tokenizer, replace(recipe, phases=recipe.phases[:1]), seed=4)
    assert not torch.equal(other.state_dict()["model.norm.weight"], weights["model.norm.weight"])
    assert COURSE.prompt(shown[0], tokenizer).endswith("<|im_start|>assistant\n")
