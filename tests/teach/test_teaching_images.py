"""Teaching with images: a sample's loss is the model's own, and what is saved is trained and evaluated further."""

import runpy
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import vision_models
from datasets import Dataset
from letter_environment import LETTER_PROMPT
from programs import run as run_program
from refusals import refused
from trl import SFTConfig, SFTTrainer

from g2po_trl import EnvironmentPool, Player, PoolLimits, Step, Trajectory, read_jsonl
from g2po_trl.cli.commands.train import read, resolve
from g2po_trl.cli.recipe_files import RECIPES
from g2po_trl.engines.base import Engine
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.evaluation.chat_models import load_model
from g2po_trl.prompts.images import load_processing_class, reads_images
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.teach import sft
from g2po_trl.teach.demonstrations import IMAGES, ExpertActor, build_rows
from g2po_trl.teach.validation import SuccessEvaluation, TeachingArguments
from g2po_trl.trajectory import image_file
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.images import as_picture

RECIPE = RECIPES / "teach_environment.py"
TASKS = [{"seed": seed} for seed in range(5)]


def play(processor, history):
    engine = Engine(processor.tokenizer, [processor.tokenizer.eos_token_id])
    engine.reads_text_because = None
    options = {"history": history, "expert": lambda *_: {"content": "b"}}
    actor = ExpertActor(engine, ChatEncoder(processor), LETTER_PROMPT, **options)
    with EnvironmentPool(vision_models.DrawnLetterEnvironment, PoolLimits(1)) as pool:
        return Player(pool, actor, EpisodeLimits(3)).play(TASKS)[0]


FAST = {("Qwen2.5-VL", "conversation")}
CASES = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
    for case in product(vision_models.FAMILIES, ("window", "conversation"))
]


@pytest.mark.parametrize(("family", "history"), CASES)
def test_the_loss_is_that_of_the_model_alone(family, history, tmp_path, monkeypatch):
    """Of all steps, each as a row of its own with the images of its prompt, without TRL's collator and loss."""
    model, processor = vision_models.build(family)
    trajectories = play(processor, history)
    steps = [step for one in trajectories for step in one.steps]
    rows = build_rows(trajectories)
    assert len(rows) == (5 if history == "conversation" else 10) and len(steps) == 10
    assert {len(row[IMAGES]) for row in rows} == {2 if history == "conversation" else 1}
    alone = SimpleNamespace(processing_class=processor, model=model)
    with torch.no_grad():
        expected = -torch.cat([vision_models.by_hand(alone, step) for step in steps]).mean()
    losses, compute_loss = [], SFTTrainer.compute_loss

    def recorded(*args, **kwargs):
        losses.append(compute_loss(*args, **kwargs))
        return losses[-1]

    monkeypatch.setattr(SFTTrainer, "compute_loss", recorded)
    args = SFTConfig(
        str(tmp_path), per_device_train_batch_size=len(rows), max_steps=1,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, max_length=None,
        gradient_checkpointing=False,
    )  # fmt: skip
    told = TeachingArguments(
        temperature=1.0, max_completion_length=2, target_success=1.0, validation_steps=9, max_turns=3
    )
    game = vision_models.DrawnLetterEnvironment
    validation = SuccessEvaluation(game, TASKS[:2], LETTER_PROMPT, told, prompts={"history": history})
    samples = [{name: value for name, value in row.items() if name != "actions"} for row in rows]
    _, results = sft.teach(model, args, Dataset.from_list(samples), validation, processor, shown=trajectories)
    assert len(losses) == 1 and losses[0].item() == pytest.approx(expected.item(), abs=2e-5)
    assert results[-1]["episodes"] == 2 and results[-1]["error_rate"] == 0


DRAWN = """
from g2po_envs.sokoban import SokobanEnvironment, expert

def drawn():
    return SokobanEnvironment(render="image")
"""
WORDS = (
    "--num_validation_episodes 3 --num_demonstrations 8 --max_steps 2 --validation_steps 9 --max_turns 3 "
    "--demonstration_turns 9 --max_completion_length 48 --use_cpu true --bf16 false --save_strategy no "
    "--num_environment_workers 1 --learning_rate 1e-3 --per_device_train_batch_size 4 --model start "
    "--disable_tqdm true"
).split()


def run(monkeypatch, *words):
    words = resolve(read(["drawn_to_teach.py:drawn", *WORDS, *words], "g2po teach"))[1]
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *words])
    runpy.run_path(str(RECIPE), run_name="__main__")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "drawn_to_teach", raising=False)
    (tmp_path / "drawn_to_teach.py").write_text(DRAWN)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"size": "tiny", "number": {number}}}\n' for number in range(6)))
    for part in vision_models.build("Idefics3"):
        part.save_pretrained(tmp_path / "start")
    return tmp_path


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_that_sees_is_taught_and_loaded_again(adapter, drawn, monkeypatch, capsys):
    """An adapter is on the language part, as in training."""
    run(monkeypatch, *(["--use_peft", "true", "--lora_target_modules", "all-linear"] if adapter else []))
    said = " ".join(capsys.readouterr().out.split())
    assert "4 of 4 demonstrations succeed" in said
    before, after = (load_model(str(drawn / name)).state_dict() for name in ("start", "runs/model-start"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("text_model" in name for name in moved)
    assert any("vision_model" in name for name in moved) != adapter
    assert reads_images(load_processing_class("runs/model-start"))
    episodes = list(read_jsonl(*drawn.glob("runs/model-start/validations/*.jsonl")))
    files = {
        image_file(drawn / "runs/model-start/validations/x", name) for one in episodes for name in one.steps[0].images
    }
    assert len(files) == 1 and all(file.is_file() for file in files)


def test_what_images_need_is_refused_before_anything_is_taught(drawn, tiny_model_dir, monkeypatch):
    with refused("padding_free"):
        run(monkeypatch, "--padding_free", "true")
    with pytest.raises(G2POError, match="has 1 images"):
        run(monkeypatch, "--model", str(tiny_model_dir), "--output_dir", "other")
    assert not (drawn / "other").exists()


def test_a_screenshot_that_replaces_an_earlier_one_begins_a_row():
    """By their token ids, prompts with other images of the same size are the same."""
    first, other = (as_picture(vision_models.drawing(seed)) for seed in (1, 2))
    steps = [
        Step("a", "b", prompt_ids=[5, 9], completion_ids=[1], prompt_images=[first]),
        Step("a", "b", prompt_ids=[5, 9, 1, 6], completion_ids=[2], prompt_images=[first]),
        Step("a", "b", prompt_ids=[5, 9, 1, 6, 2, 9], completion_ids=[3], prompt_images=[other, first]),
    ]
    rows = build_rows([Trajectory("t", steps, 10.0, "success")])
    assert [(row["input_ids"], row[IMAGES]) for row in rows] == [
        ([5, 9, 1, 6, 2], [str(first)]),
        ([5, 9, 1, 6, 2, 9, 3], [str(other), str(first)]),
    ]


@pytest.mark.slow
def test_from_random_weights_to_training(tmp_path):
    """The commands of the two recipes, with few steps: Sokoban drawn, taught, trained, evaluated and viewed."""

    def g2po(*words):
        done = run_program("-m", "g2po_trl", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    maker = "g2po_envs.sokoban.make_tiny_vision_model"
    assert run_program("-m", maker, "--output", "start", "--levels", "20", cwd=tmp_path).returncode == 0
    teaching = ("--config", "sokoban-images", "--model", "start", "--tasks", "start/tasks.jsonl", "--max_steps", "3")
    said = g2po("teach", "g2po_envs.sokoban.tiny:drawn_environment", *teaching, "--num_validation_tasks", "4")
    assert "12 of 12 demonstrations succeed" in said
    few = ("--max_steps", "2", "--num_levels", "8", "--num_eval_levels", "3", "--per_device_train_batch_size", "16")
    said = g2po("train", "sokoban", "--config", "tiny-images", *few)
    assert "iteration   2/2" in said and "refused" not in said
    assert "sokoban-direct-sokoban-images" in g2po("evaluate", "--model", "runs/sokoban-images", "--limit", "3")
    g2po("view", "runs/sokoban-images", "--no-open")
    assert (tmp_path / "runs/sokoban-images/view.html").is_file()
