"""What an iteration of the default setting costs, in counts: they cannot flake, and growth is a regression.

`budgets.json` holds the limits. One that is exceeded for a good reason is raised there, in the same commit.
"""

import json
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from letter_trainer import make_config

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, Manifest, generate_games
from g2po_envs.alfworld.tiny import tiny_model_path
from g2po_trl import G2POTrainer
from g2po_trl import trainer as trainer_module
from g2po_trl.update import log_probs, update

BUDGETS = json.loads(Path(__file__).with_name("budgets.json").read_text())


MODULES_THAT_GATHER = (trainer_module, log_probs, update)
HIDDEN = ("help", "look", "inventory", "examine")


class Counted:
    """Counts what passes through the model and the gathers of one iteration."""

    def __init__(self, trainer, monkeypatch):
        self.passes, self.positions = {"trained": 0, "not trained": 0}, 0
        self.gathered, self.rolling_out = 0, False
        body = trainer.accelerator.unwrap_model(trainer.model).base_model
        body.register_forward_pre_hook(self.count_forward, with_kwargs=True)
        trainer.ref_model.base_model.register_forward_pre_hook(self.count_forward, with_kwargs=True)
        generate = trainer.player.actor.engine.generate

        def watched(prompts, sampling, *more):
            self.rolling_out = True
            try:
                return generate(prompts, sampling, *more)
            finally:
                self.rolling_out = False

        def count_gather(objects):
            self.gathered += len(pickle.dumps(objects))
            return objects

        monkeypatch.setattr(trainer.player.actor.engine, "generate", watched)
        for module in MODULES_THAT_GATHER:
            monkeypatch.setattr(module, "gather_object", count_gather)
        monkeypatch.setattr(trainer.credit, "gather", count_gather)

    def count_forward(self, module, arguments, named):
        if not self.rolling_out:
            self.passes["trained" if torch.is_grad_enabled() else "not trained"] += 1
            self.positions += named["input_ids"].numel()


@pytest.fixture(scope="module")
def iteration(tmp_path_factory):
    """One iteration of 2 groups of 8, what it logged and what it cost."""
    folder = tmp_path_factory.mktemp("budgets")
    generate_games(folder / "games", "train", 2, seed=0, size="tiny", num_workers=1)
    manifest = Manifest.scan(folder / "games")
    sizes = {"per_device_train_batch_size": 16, "num_generations": 8, "max_steps": 1, "max_turns": 15, "beta": 0.01}
    sizes |= {"max_completion_length": 24, "max_tokens_per_micro_batch": 2048, "num_environment_workers": 2}
    args = make_config(folder / "out", seed=42, **sizes)
    trainer = G2POTrainer(
        str(tiny_model_path()),
        args,
        Dataset.from_list(manifest.rows()),
        environment_factory=partial(AlfworldEnvironment, manifest, hidden_actions=HIDDEN, intro=False),
        prompt_template=ALFWORLD_COMPACT_PROMPT,
    )
    trainer.update.layout.checked_length = 10**9  # seldom: not a cost of an iteration
    trainer.remove_callback(trainer.start_check)  # once a run
    trainer.start_check._has_seen_engine = True
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(trainer, monkeypatch)
        trainer.train()
    trainer.close()
    (log, *_) = [log for log in trainer.state.log_history if "update/step_samples" in log]
    return counted, log


def test_the_model_is_passed_through_once_for_the_reference_and_once_for_the_update(iteration):
    counted, log = iteration
    micro_batches = log["update/micro_batches"]
    assert counted.passes == {"trained": micro_batches, "not trained": micro_batches}
    assert counted.positions == 2 * log["update/forwarded_tokens"]


def test_budgets(iteration):
    counted, log = iteration
    steps = log["update/step_samples"]
    spent = {
        "forwarded token positions of a step sample": log["update/forwarded_tokens"] / steps,
        "padding fraction of the update": log["update/padding_fraction"],
        "bytes gathered of a step sample": counted.gathered / steps,
    }
    for name, value in spent.items():
        assert value <= BUDGETS[name], name
    name = "repeated token fraction of the update, at least"
    assert log["update/repeated_token_fraction"] >= BUDGETS[name], name
