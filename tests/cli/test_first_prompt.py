"""The first prompt that `g2po check --show` prints: the training's, to the token."""

from pathlib import Path

import programs
import pytest
import vision_models
from scripted_actors import ScriptedEngine
from tools_by_hand import Safe
from toy_environments import KeyDoorEnvironment
from transformers import AutoTokenizer
from vision_models import DrawnLetterEnvironment

from g2po_trl import EnvironmentPool, G2POError, Player, PoolLimits, PromptActor, PromptTemplate
from g2po_trl.cli.commands.check import FirstPrompt
from g2po_trl.engines.base import Completion
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.setup import agent_factory, played_as
from g2po_trl.evaluation.agents import DirectAgent
from g2po_trl.prompts.tokenization import ChatEncoder

HELPERS = Path(__file__).parents[1] / "helpers"


def test_the_first_prompt_is_shown(tiny_model_dir):
    where = "-m", "g2po_trl", "check", "toy_environments.py:KeyDoorEnvironment", "--show"
    where += "--task", '{"key_room": "cellar"}'
    shown = programs.run(*where, cwd=HELPERS).stdout
    assert shown.startswith("--- user ---\n") and "Observation: " in shown and "Possible actions:\ngo kitchen" in shown
    shown = programs.run(*where, "--model", str(tiny_model_dir), cwd=HELPERS).stdout
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
    first = FirstPrompt(made, task, EpisodeLimits(3), template, settings)
    ids, text = first.tokens_for(str(tiny_model_dir))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    factory, wording, history = played_as(made, EpisodeLimits(3), template, settings["history"])
    engine = ScriptedEngine(tokenizer, lambda prompts: [Completion(tokenizer("a")["input_ids"]) for _ in prompts])
    actor = PromptActor(engine, ChatEncoder(tokenizer), wording, history=history, max_prompt_length=700)
    with EnvironmentPool(factory, PoolLimits(1)) as pool:
        ((played,), _) = Player(pool, actor, EpisodeLimits(3)).play([task])
    assert played.steps[0].prompt_ids == ids and len(ids) > 10, played
    if kind in ("tools", "agent"):
        asked = DirectAgent(wording, history=history).ask(first.episode).messages
        assert "turn" in text if kind == "tools" else "Open it." in text, "the tools are in it"
        assert len(ids) > len(tokenizer.apply_chat_template(asked, tokenize=True)), "which a template adds"
    assert first.text(str(tiny_model_dir)).endswith(f"--- {len(ids)} tokens ---")


def test_the_first_prompt_has_its_images(tmp_path, tiny_model_dir):
    model, processor = vision_models.build("Gemma 3")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    first = FirstPrompt(DrawnLetterEnvironment, {"seed": 1}, EpisodeLimits(3))
    ids, _ = first.tokens_for(str(tmp_path))
    wanted, _ = ChatEncoder(processor)(DirectAgent(first.template).ask(first.episode).messages)
    assert ids == wanted and processor.image_token_id in ids
    assert f"[image {first.episode.observation.images[0]}]" in first.text()
    with pytest.raises(G2POError):
        first.tokens_for(str(tiny_model_dir))
