"""`g2po evaluate` plays conversations, tools and agents as the trainer does, and asks servers in their protocol."""

import json
import shutil
import sys

import pytest
from chat_server import chat_completion, chat_server
from datasets import Dataset
from letter_environment import LETTER_PROMPT, LetterEnvironment
from letter_trainer import make_config
from peft import LoraConfig
from scripted_actors import SeededEngine
from shipped_templates import FOLDER
from tools_by_hand import Safe
from transformers import AutoModelForCausalLM

from g2po_trl import G2POTrainer, load_agent, read_jsonl
from g2po_trl.cli.commands.evaluate import main
from g2po_trl.environments.loading import load
from g2po_trl.rollout.actor import PromptActor

AGENT = '''
"""Says two letters; early ones win."""

GOOD = 10.0


def letters(task, client):
    model, messages, good = client.openai(), [{"role": "user", "content": f"hall {task['seed']}"}], 0
    for stop in (None, ["k", "t"]):
        said = model.chat.completions.create(model=client.model, messages=messages, stop=stop, max_tokens=9)
        text = said.choices[0].message.content or ""
        good += "a" <= text.lower()[:1] <= "m"
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "kitchen"}]
    return GOOD * (good == 2)
'''
SAFES = Dataset.from_list([{"code": code, "prompt": f"Open {code}."} for code in ("1", "11", "12")])
SEEDS = Dataset.from_list([{"seed": seed} for seed in range(3)])


@pytest.fixture
def agent(tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.setattr(sys, "path", sys.path[:])
    sys.modules.pop("letters_of_this_test", None)
    path = tmp_path / "letters_of_this_test.py"
    path.write_text(AGENT)
    return path


@pytest.fixture
def model(tiny_model_dir, tmp_path):
    """The tiny model with a chat template that renders tools."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "chat_template.jinja").write_text((FOLDER / "qwen2_5.jinja").read_text(encoding="utf-8"))
    return folder


def played(path):
    """What can be compared of each episode: all that was asked, said and answered."""
    fields = ("observation", "action", "valid", "completion", "prompt_ids", "completion_ids", "messages", "reward")
    return [(t.outcome, t.reward, [[getattr(step, name) for name in fields] for step in t.steps]) for t in path]


WINDOW = {"history_length": 1, "generation_kwargs": {"no_repeat_ngram_size": 2}}
RUNS = {
    "agent": {"max_completion_length": 90},
    "tools": {"max_completion_length": 90},
    "conversation": {"max_completion_length": 90, "history": "conversation"},
    "mixed precision": {"bf16": True, **WINDOW},
    "half weights": {"model_init_kwargs": {"dtype": "bfloat16"}, **WINDOW},
    # trained in float32, TRL's default
    "adapter of half weights": WINDOW,
}
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("conversation", "half weights"))) for kind in RUNS]


@pytest.mark.parametrize("kind", KINDS)
def test_run_is_evaluated_as_the_trainer_does(kind, model, agent, tmp_path, monkeypatch):
    """Greedily by the trained model, and by an engine whose completions follow from prompt and seed.

    Completion by completion, whatever the model is and is computed in; with the run's prompts and options.
    """
    letters = {"environment_factory": LetterEnvironment, "prompt_template": LETTER_PROMPT}
    how = letters if kind not in ("agent", "tools") else {"environment_factory": Safe}
    if kind == "agent":
        how = {"agent": load(f"{agent}:letters")}
    if kind == "adapter of half weights":
        AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16").save_pretrained(model)
        how["peft_config"] = LoraConfig(r=8, lora_alpha=64, target_modules="all-linear")
    options = {"max_steps": 1, "max_completion_length": 12, "max_turns": 3, "stop_sequences": ["so it"]}
    options |= {"eval_temperature": 0.0, "max_prompt_length": 900, "save_trajectories": True, "learning_rate": 1e-2}
    tasks = SAFES if kind == "tools" else SEEDS
    args = make_config(tmp_path / "out", **options | RUNS[kind])
    trainer = G2POTrainer(str(model), args, tasks, tasks, **how)
    try:
        trainer.train()
        trainer.evaluate()
        trainer.save_model()
        theirs = {0.0: list(read_jsonl(tmp_path / "out" / "trajectories" / "eval-000001.jsonl"))}
        trainer.player.actor.engine = SeededEngine(trainer.processing_class)
        args.eval_temperature = 1.0
        theirs[1.0] = trainer.panels.play_all([dict(row) for row in tasks], 1.0)[0]
    finally:
        trainer.close()
    if WINDOW.items() <= RUNS[kind].items():
        action = load_agent(tmp_path / "out").act(LetterEnvironment().reset(seed=0))
        assert action == theirs[0.0][0].steps[0].action, "in Python, too"
    for temperature, trajectories in theirs.items():
        if temperature:
            loaded = PromptActor.from_engine(SeededEngine(trainer.processing_class), context_length=4096)
            monkeypatch.setattr("g2po_trl.evaluation.chat_models.load_local", lambda *_, loaded=loaded, **more: loaded)
        output = tmp_path / f"evaluation-{temperature}"
        given = ["--model", str(tmp_path / "out"), "--temperature", str(temperature), "--output", str(output)]
        main([*given, "--num-environment-workers", "1"])
        ours = list(read_jsonl(output / "trajectories" / "direct-0.jsonl"))
        ours.sort(key=lambda trajectory: trajectory.info["panel_index"])
        assert played(ours) == played(trajectories)
        assert [t.info["prompt_tokens"] for t in ours] == [sum(len(s.prompt_ids) for s in t.steps) for t in ours]
    assert any(len(t.steps) > 1 for t in ours) and len({t.steps[0].completion for t in ours}) > 1
    precision = json.loads((output / "settings.json").read_text())["precision"]
    weights, forward = kind == "half weights", kind == "mixed precision"
    assert precision == {"dtype": "bfloat16" if weights else "float32", "autocast": "bfloat16" if forward else None}


@pytest.fixture
def server():
    """Turns the dial to 1 and to 2, then speaks; without tools it says "a" and more."""
    pytest.importorskip("openai")

    def answer(body, headers):
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if not body.get("tools") or turn == 2:
            return 200, chat_completion("Done." if body.get("tools") else "a key")
        function = {"name": "turn", "arguments": json.dumps({"digit": turn + 1})}
        calls = [{"id": f"theirs_{turn}", "type": "function", "function": function}]
        return 200, chat_completion({"role": "assistant", "content": None, "tool_calls": calls})

    with chat_server(answer) as server:
        yield server


@pytest.fixture
def served(server, tmp_path):
    def play(row, *more):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        given = ["--model", "m", "--base-url", server.url, "--tasks", str(tmp_path / "rows.jsonl")]
        main([*given, "--output", str(tmp_path / "out"), "--num-environment-workers", "1", *more])
        (trajectory,) = read_jsonl(tmp_path / "out" / "trajectories" / "direct-0.jsonl")
        assert (trajectory.outcome, trajectory.reward) == ("success", 10.0)
        return trajectory

    return play


def test_tool_class_with_a_server_uses_its_tool_calls(server, served):
    trajectory = served({"code": "12", "prompt": "Open."}, "--environment", f"{Safe.__module__}:Safe")
    assert {tool["function"]["name"] for tool in server.asked[0]["tools"]} == {"turn", "listen"}
    first, call, result, _, last = server.asked[2]["messages"]
    assert first == {"role": "user", "content": "Open.The safe is locked."}
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"digit": 1} and call["content"] is None
    assert (result["content"], result["tool_call_id"]) == ("click", "theirs_0")
    assert (last["content"], last["tool_call_id"]) == ("click", "theirs_1")
    assert [[m["role"] for m in step.messages] for step in trajectory.steps] == [["user"], ["tool"], ["tool"]]
    action = json.loads(trajectory.steps[1].action)
    assert action["tool_calls"][0]["function"] == {"name": "turn", "arguments": {"digit": 2}}
    assert trajectory.info["prompt_tokens"] == 21 and trajectory.steps[0].completion == 'turn({"digit": 1})'


def test_agent_with_a_server_gets_what_it_asks_for(server, agent, served):
    trajectory = served({"seed": 4}, "--agent", str(agent), "--max-completion-length", "50")
    assert [body.get("stop") for body in server.asked] == [None, ["k", "t"]]
    assert [body["max_tokens"] for body in server.asked] == [9, 9], "the smaller one"
    assert [m["content"] for m in server.asked[1]["messages"]] == ["hall 4", "a key", "kitchen"]
    assert [json.loads(step.action)["content"] for step in trajectory.steps] == ["a key", "a "]
    assert [m["content"] for m in trajectory.steps[1].messages] == ["kitchen"], "what is new"
