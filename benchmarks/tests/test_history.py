"""Both forms are taught the same actions, in the prompts of the rollout; the table reads what runs write."""

import itertools
import json

import pytest
import torch

from benchmarks.learning import history_report, history_teaching
from g2po_envs.tiny.demonstration import Demonstration

TURNS = (  # observation, actions, what the expert says, what the walker did
    ("You are in the middle of a room.", ("go to desk 1", "go to safe 2"), "go to desk 1", "go to safe 2"),
    ("The safe 2 is closed.", ("go to desk 1", "open safe 2"), "open safe 2", "open safe 2"),
    (
        "You open the safe 2. You see a mug 3.",
        ("go to desk 1", "take mug 3 from safe 2"),
        "go to desk 1",
        "go to desk 1",
    ),
    ("On the desk 1, you see a mug 1.", ("go to safe 2", "take mug 1 from desk 1"), "take mug 1 from desk 1", None),
)


@pytest.fixture(scope="module")
def tokenizer():
    return history_teaching.load_start()[1]


def walks():
    """One walk, with all earlier steps in each demonstration, as the walker writes them."""
    shown, history = [], []
    for turn, (seen, actions, expert, played) in enumerate(TURNS):
        shown.append(Demonstration("put a mug in safe", seen, list(actions), list(history), turn, expert))
        history.append((seen, played))
    return history_teaching.walks_of([*shown, *shown])


def trained(rows, tokenizer):
    """The trained completions, in order."""
    labels = [label for _, of_row in rows for label in of_row if label != -100]
    return [text for text in tokenizer.decode(labels).split("<|im_end|>") if text]


def test_walks_are_told_apart_and_the_last_action_is_the_experts():
    first, second = walks()
    assert [played for _, played in first] == ["go to safe 2", "open safe 2", "go to desk 1", "take mug 1 from desk 1"]
    assert first == second


def test_both_forms_train_what_the_walker_did_as_the_expert_says(tokenizer):
    (walk, _), rows = walks(), {}
    for history in history_teaching.HISTORIES:
        rows[history] = history_teaching.rows_of(history_teaching.make_actor(tokenizer, history), walk)
        assert trained(rows[history], tokenizer) == [
            f"<think></think><action>{action}</action>"
            for action in ("open safe 2", "go to desk 1", "take mug 1 from desk 1")
        ]
    assert len(rows["window"]) == 3 and len(rows["conversation"]) == 1
    read = tokenizer.decode(rows["conversation"][0][0])
    assert read.count("<|im_start|>user\n") == 4 and read.count("Task: put a mug in safe") == 1
    assert read.count("\nActions:\n") == 4, "each turn lists its actions, in the words of the first message"
    assert all(seen in read for seen, *_ in TURNS) and "<action>go to safe 2</action>" in read


def test_both_forms_are_shown_the_same_walks_in_the_same_words(tokenizer):
    names = set()
    for history in history_teaching.HISTORIES:
        actor = history_teaching.make_actor(tokenizer, history)
        batches = itertools.islice(history_teaching.batches(walks(), 3, seed=0), 2)
        rows = [row for batch in batches for walk in batch for row in history_teaching.rows_of(actor, walk)]
        names.add(tuple(trained(rows, tokenizer)))
    ((said,),) = [names]
    assert len(said) == 18 and len(set(said)) > 9, "names are exchanged from walk to walk"


def test_teaching_lowers_the_loss_of_a_conversation():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = history_teaching.load_start()
    actor = history_teaching.make_actor(tokenizer, "conversation")
    rows = history_teaching.rows_of(actor, walks()[0])
    before = history_teaching.loss_of(model, rows, tokenizer.pad_token_id).item()
    found = history_teaching.teach(history_teaching.Course(walks(), 10, 2), model, tokenizer, "conversation")
    after = history_teaching.loss_of(model, rows, tokenizer.pad_token_id).item()
    assert after < before and found["actions"] == 60 and len(found["losses"]) == 10
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 4096


def test_the_table_has_a_number_a_seed(tmp_path):
    for history, tokens in (("window", 100), ("conversation", 450)):
        for seed in (0, 1):
            curves = {
                "episode/success_rate": [0.25, 0.5],
                "rollout/steps": [10, 10],
                "rollout/prompt_tokens": [10 * tokens, 12 * tokens],
            }
            panels = [
                {"step": step, "temperature": 1.0, "success_rate": success}
                for step, success in ((0, 0.2), (2, 0.4 + seed / 10))
                if step or not seed
            ]
            run = {"seed": seed, "panels": panels, "curves": curves}
            (tmp_path / f"{history}-seed{seed}.json").write_text(json.dumps(run))
    table = history_report.report(tmp_path)
    assert table == (tmp_path / "table.md").read_text()
    rows = {cells[1].strip(): cells[2:4] for cells in (line.split("|") for line in table.splitlines())}
    assert [cell.strip() for cell in rows["held-out success at 1.0, start, %"]] == ["20.0 / –"] * 2
    assert [cell.strip() for cell in rows["held-out success at 1.0, after training, %"]] == ["40.0 / 50.0"] * 2
    assert [cell.strip() for cell in rows["prompt tokens of a step"]] == ["110 / 110", "495 / 495"]
