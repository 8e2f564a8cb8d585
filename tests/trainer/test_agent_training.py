"""Agents under the trainer: their requests are steps."""

import json
import logging
import shutil

import torch
from conftest import build_tokenizer  # noqa: F401  (its folder is on the path)
from letter_trainer import TASKS, flat_weights, make_config, played_in

from g2po_trl import G2POTrainer
from g2po_trl.agents.agent import AgentEnvironment
from g2po_trl.runs.run_json import load_object, read_run


def right(text):
    return "a" <= (text or "").strip().lower()[:1] <= "m"


def letters(task, client):
    """Says two letters; early ones win."""
    model, messages, good = client.openai(), [{"role": "user", "content": f"hall {task['seed']}"}], 0
    for _ in range(2):
        said = model.chat.completions.create(model=client.model, messages=messages, temperature=0.1)
        text = said.choices[0].message.content or ""
        good += right(text)
        answer = "kitchen" if right(text) else "cellar"
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": answer}]
    return 10.0 * (good == 2)


def make(model, folder, agent, tasks=TASKS, **options):
    args = make_config(folder, **{"max_steps": 2, "max_completion_length": 4, "save_trajectories": True, **options})
    return G2POTrainer(str(model), args, tasks, agent=agent)


def test_agent_trains_and_its_run_can_be_loaded(tmp_path, tiny_model_dir, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = make(tiny_model_dir, tmp_path / "run", letters, report_to="none")
        before = flat_weights(trainer)
        trainer.train()
        trainer.close()
    played = played_in(trainer)
    assert all(t.outcome in ("success", "failure") and len(t.steps) == 2 for t in played)
    for trajectory in played:
        one, two = trajectory.steps
        assert trajectory.reward == 10.0 * all(right(json.loads(step.action)["content"]) for step in (one, two))
        assert one.messages == [{"role": "user", "content": one.observation[6:]}]
        assert [m["content"] for m in two.messages] in (["kitchen"], ["cellar"])
        begun = one.prompt_ids + one.completion_ids
        assert two.prompt_ids[: len(begun)] == begun, "ids are the engine's"
        assert json.loads(one.state_key) == one.messages
        answer, *news = json.loads(two.state_key)
        assert answer["role"] == "assistant" and news == two.messages, "short news go with what they answer"
    if len({t.reward for t in played}) > 1:
        assert not torch.equal(before, flat_weights(trainer))
    assert sum("The agent sets temperature" in record.message for record in caplog.records) == 1
    run = read_run(tmp_path / "run")
    factory = load_object(run["environment"])
    assert factory.func is AgentEnvironment and factory.keywords["agent"].__name__ == "letters"
    assert factory.keywords["max_turns"] == 6


def test_model_is_saved_with_the_template_of_its_conversations(tmp_path, tiny_model_dir):
    from shipped_templates import FOLDER  # not above: workers import this module, and these are slow

    model, run = shutil.copytree(tiny_model_dir, tmp_path / "model"), tmp_path / "run"
    own, trained = ((FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in ("qwen3", "qwen3_training"))
    (model / "chat_template.jinja").write_text(own)
    (tmp_path / "asking.py").write_text(
        "from scripted_agents import ask_plainly\n\n\ndef agent(task, client):\n"
        "    return float(len(ask_plainly(client, 'hall')) % 2)\n"
    )
    agent = f"{tmp_path}/asking.py:agent"
    trainer = make(model, run, agent, max_steps=1, save_strategy="steps", save_steps=1, report_to="none")
    trainer.train()
    trainer.save_model(str(run / "mine"))
    assert trainer.processing_class.chat_template == own
    trainer.close()
    for folder in (run / "checkpoint-1", run / "mine"):
        assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == trained
    assert read_run(run)["chat_template"]["of"] == "TRL, for training"
