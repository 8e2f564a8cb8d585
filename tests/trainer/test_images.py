"""Images, from an environment's observation to the gradient: a tiny vision-language model of each family."""

import base64
import json
import os
import signal
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
import vision_models
from letter_environment import DrawnLetterEnvironment, drawing
from letter_trainer import flat_gradient, flat_weights, gradient_of, played_in
from peft import LoraConfig
from PIL import Image
from vision_models import by_hand

from g2po_trl import G2POError, Observation, PPOConfig, PPOTrainer, PromptActor, StepResult, TextEnvironment
from g2po_trl.engines.transformers import TransformersEngine
from g2po_trl.engines.vllm_requests import RequestEngine
from g2po_trl.environments.pool.answers import Answer, InvalidAnswerError, decode, encode
from g2po_trl.environments.pool.pool import EnvironmentPool
from g2po_trl.environments.validation import EnvironmentContractError, validate_observation
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.trajectory import image_file
from g2po_trl.update.batch import StepBatch
from g2po_trl.utils.images import as_picture

cloudpickle.register_pickle_by_value(vision_models)  # by reference, workers would import transformers
OTHERS = [one for one in vision_models.FAMILIES if one != "Qwen2.5-VL"]
FAMILIES = ["Qwen2.5-VL", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]


@pytest.fixture
def make(make_trainer):
    def make(family, environment=DrawnLetterEnvironment, **options):
        model, processor = vision_models.build(family)
        return make_trainer(environment, model=model, processing_class=processor, **{"max_turns": 3, **options})

    return make


def play_batch(trainer, episodes=4):
    trajectories, _ = trainer.play([{"seed": seed // 2} for seed in range(episodes)])
    number = sum(len(one.steps) for one in trajectories)
    return trajectories, StepBatch.from_trajectories(trajectories, np.random.default_rng(0).normal(size=number))


@pytest.mark.parametrize("history", [pytest.param("window", marks=pytest.mark.slow), "conversation"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_gradient_are_those_of_rows_alone(make, family, history):
    trainer = make(family, history=history, beta=0.0, loss_type="dapo")
    trajectories, batch = play_batch(trainer)
    steps = [step for one in trajectories for step in one.steps]
    assert {len(step.shown_images) for step in steps} == ({1, 2} if history == "conversation" else {1})
    (whole,), _ = trainer.update.make_mini_batches(trainer.model, batch)
    assert trainer.update.layout.kind == ("padded" if family == "Gemma 3" else "shared"), "whether images are causal"
    trainer.model.eval()
    with torch.no_grad():
        scored = trainer.update.score(trainer.model, trainer.update.micro_batch(batch))
    trainer.model.zero_grad()
    loss = 0.0
    for row, step in enumerate(steps):
        alone = by_hand(trainer, step)
        assert (scored[row, : len(alone)] - alone).abs().max() < 1e-5
        loss = loss - batch.advantages[row] * alone.sum() / sum(len(one.completion_ids) for one in steps)
    loss.backward()
    wanted = gradient_of(trainer)
    found = flat_gradient(trainer, whole)
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    trainer.update.config.max_tokens = 80  # several micro-batches
    (parts,), _ = trainer.update.split([batch])
    assert len(parts) > 1
    assert (flat_gradient(trainer, parts) - wanted).norm() / wanted.norm() < 1e-5
    batch.images = [[*images, as_picture(255 - np.array(last.open()))] for *images, last in batch.images]
    with torch.no_grad():
        other = trainer.update.score(trainer.model, trainer.update.micro_batch(batch))
    assert (other - scored).abs().max() > 1e-3, "what is seen matters"


def test_images_whose_tokens_see_each_other_are_padded(make):
    """By the model's own rule: what is scored here is beyond the window, and bfloat16 would hide it elsewhere."""
    trainer = make("Gemma 3", beta=0.0, bf16=True)
    assert trainer.update.layout.kind == "shared"
    trainer.update.make_mini_batches(trainer.model, play_batch(trainer)[1])
    assert trainer.update.layout.kind == "padded"


def test_lora_checkpointing_and_resume_in_the_middle_of_an_iteration(make, tmp_path):
    options = {"peft_config": LoraConfig(target_modules="all-linear", r=2), "max_steps": 2, "steps_per_generation": 2}
    options |= {"per_device_train_batch_size": 4, "gradient_checkpointing": True, "beta": 0.1}
    whole = make("Qwen2.5-VL", output="whole", save_strategy="steps", save_steps=1, **options)
    trained = [name for name, one in whole.model.named_parameters() if one.requires_grad]
    assert trained and not any("visual" in name for name in trained), "LoRA is on the language part"
    whole.train()
    again = make("Qwen2.5-VL", output="again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert torch.equal(flat_weights(again), flat_weights(whole))
    for step in (step for played in played_in(whole) for step in played.steps):
        assert image_file(tmp_path / "whole" / "trajectories" / "x", step.images[0]).is_file()
        assert step.key == f"{step.observation}\n{step.images[0]}"


def test_who_cannot_take_images_says_so_before_the_first_rollout(make, make_trainer):
    with pytest.raises(G2POError, match="1 images, and the model reads only text"):
        make_trainer(DrawnLetterEnvironment)
    with pytest.raises(G2POError, match="the critic of PPO reads text alone"):
        make("Qwen2.5-VL", trainer_class=PPOTrainer, config_class=PPOConfig)
    processor = vision_models.qwen()[0]
    seen = Observation("a", images=[as_picture(drawing(1))])
    sharded = TransformersEngine(processor.tokenizer, [1], None, is_collective=True)
    sharded.read_images(processor)
    for engine, why in ((sharded, "is sharded"), (RequestEngine(processor.tokenizer, [1]), "engine='transformers'")):
        with pytest.raises(G2POError, match=why):
            PromptActor(engine, ChatEncoder(processor)).choose_template(seen)
    model, processor = vision_models.build("Qwen2.5-VL")
    processor.chat_template = processor.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(G2POError, match="0 times for 1 images"):
        make_trainer(DrawnLetterEnvironment, model=model, processing_class=processor)


class Gallery(TextEnvironment):
    """Shows what a task names, and the same again."""

    def reset(self, images, size=8):
        self.images = [np.full((size, size, 3), image, np.uint8) for image in images]
        return Observation("look", images=self.images)

    def step(self, action):
        return StepResult(Observation(action, images=self.images))


def test_an_image_is_sent_once_and_is_the_same_after_a_replay():
    with EnvironmentPool(Gallery, num_environment_workers=1, max_observation_images=2, max_image_pixels=64) as pool:
        tasks = [{"images": [1, 2]}, {"images": [2]}, {"images": [1, 2, 3]}, {"images": [1], "size": 9}]
        seen = pool.reset(tasks)
        assert [image.size for image in seen[0].images] == [(8, 8)] * 2 and seen[0].images[1] is seen[1].images[0]
        assert "max_observation_images=2" in seen[2].message
        assert "max_image_pixels=64" in seen[3].message
        assert np.array(seen[0].images[0].open()).tolist() == np.full((8, 8, 3), 1).tolist()
        again = pool.step({0: "on"})[0].observation
        assert again.images == seen[0].images and again.state_key == "on\n" + "\n".join(again.images)
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        last = pool.step({0: "on"})[0].observation
        assert pool.replayed == 1 and last.images[0] is seen[0].images[0]


def test_a_worker_sends_bytes_once_and_names_no_file(tmp_path):
    picture, shown, known = as_picture(drawing(1)), set(), {}
    answer = Answer(1, "d", validate_observation(Observation("a", images=[picture]), "it"))
    first, second = encode(answer, shown), encode(answer, shown)
    assert len(first) > 1000 > len(second)
    Path(tmp_path / "secret.png").write_bytes(picture.png)
    cut = {picture: base64.b64encode(picture.png[:-20]).decode()}
    with pytest.raises(InvalidAnswerError):
        decode(second, known)
    assert decode(first, known) == decode(second, known) == answer
    for images, those in (([[str(tmp_path / "secret.png")], {}], known), ([[picture], cut], {})):
        forged = json.loads(second)
        forged[2]["images"] = images
        with pytest.raises(InvalidAnswerError):
            decode(json.dumps(forged).encode(), those)


def test_what_is_no_image_is_refused_by_name():
    """Values beyond 255 would be white, fractions black."""
    wide, fractions = np.full((4, 4), 300, np.uint16), np.full((4, 4), 0.5, np.float32)
    drawn = [Image.fromarray(wide), Image.fromarray(fractions)]
    for given in ("https://a.b/c.png", "/no/file.png", "data:image/png;base64,?", 3, np.zeros((4, 4)), *drawn):
        with pytest.raises(EnvironmentContractError, match="reset: an image is"):
            validate_observation(Observation("a", images=[given]), "reset")
