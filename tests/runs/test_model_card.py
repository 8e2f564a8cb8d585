"""The card shows what a run's evaluations found, of each panel."""

import re

import pytest
from tools_by_hand import Safe

from g2po_trl import Observation, Step, Trajectory
from g2po_trl.engines.sampling import Sampling
from g2po_trl.runs.metrics import summarize
from g2po_trl.runs.model_card import results_of
from g2po_trl.runs.summary import REPORT, before_and_after, before_and_after_by_panel


def card(*evaluations, best_was_chosen=False):
    """`evaluations`: name, step and how many of four episodes succeeded."""
    entries = []
    for name, step, won in evaluations:
        outcomes = ["success"] * won + ["failure"] * (4 - won)
        summary = summarize([Trajectory("t", [Step("a", "b")], 1.0, outcome) for outcome in outcomes])
        entries.append({"name": name, "step": step, "panel": f"hash of {name}", "temperature": 0.4, **summary})
    return results_of(entries, best_was_chosen)


def test_all_panels_are_shown_or_the_reported_alone():
    text = card(("eval_seen", 0, 1), ("eval_unseen", 0, 0), ("eval_seen", 10, 3), ("eval_unseen", 10, 2))
    for name, before, after in (("eval_seen", 25, 75), ("eval_unseen", 0, 50)):
        table = text.partition(f"(`{name}`, tasks `hash of {name}`)")[2].partition("success: all")[2]
        assert table.split()[:3] == [f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}"], name
    text = card((REPORT, 0, 1), ("eval", 5, 4), (REPORT, 10, 2))
    assert f"`{REPORT}`" in text and "`eval`" not in text
    assert "chosen here, so success is too high on average" in card(("eval", 0, 1), best_was_chosen=True)


def test_only_the_same_tasks_at_the_same_temperature_are_compared():
    """A resume may play other evaluation tasks, or at another temperature."""
    first = {"name": "eval", "step": 0, "panel": "a", "temperature": 0.4}
    then, last = {**first, "step": 5, "temperature": 1.0}, {**first, "step": 9, "temperature": 1.0}
    assert before_and_after([first, then, last]) == (then, last)
    assert before_and_after([first, {**last, "panel": "b"}])[0]["step"] == 9
    assert before_and_after_by_panel([first, then])["eval"] == (then, then)
    assert before_and_after([first, {**first, "step": 9}])[0] is first


@pytest.mark.parametrize("kind", ["window", "tools"])
def test_the_loaded_agent_answers_as_the_trainer_does(make_trainer, tmp_path, kind):
    """Greedily, in an episode of the trained model: the same prompts, completions and actions, as the card says."""
    options = {} if kind == "window" else {"environment": Safe, "history": "conversation"}
    trainer = make_trainer(max_steps=1, eval_temperature=0.0, gamma=0.5, **options)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    ((played,), _) = trainer.player.play([{"seed": 1}], Sampling(temperature=0.0, max_completion_length=2))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| gamma | 0.5 |" in card and "| output_dir" not in card
    (code,) = re.findall("```python\n(.*?)```", card, re.DOTALL)
    names = {}
    exec(compile(code.partition("action =")[0], "card", "exec"), names)
    agent = names["agent"]
    if kind == "window":
        for step in played.steps:
            assert agent.act(Observation(step.observation, task=played.task)) == step.action
            assert agent.episode.steps[-1].prompt_ids == step.prompt_ids
    else:
        observation = trainer.player.pool.reset([{"seed": 1}])[0]
        trainer.player.pool.end()
        assert agent.act(observation) == played.steps[0].action
        assert agent.episode.steps[0].prompt_ids == played.steps[0].prompt_ids
        assert agent.episode.transcript.ids, "a conversation goes on from it"
