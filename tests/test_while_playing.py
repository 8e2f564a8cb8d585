"""Gradients of groups that are complete while others play: the same gradient, the same log, nothing left behind."""

import json
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest
import torch
from letter_environment import BreakingEnvironment, PatchyEnvironment
from letters_engine import LettersEngine
from peft import LoraConfig
from transformers import TrainerCallback

from g2po_trl import G2POConfig, G2POTrainer, parts
from g2po_trl.rollout.background import Background
from g2po_trl.while_playing import make_while_playing

SCRIPT = Path(__file__).parent / "while_playing_script.py"
MORE_LOGGED = {"time/update_while_playing", "update/while_playing_fraction"}
# What depends on the cut into micro-batches, and on the clock.
DIFFERS = ("time/", "update/", "rollout/token", "train_", "total_flos", "step_time")


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]))


def gradients_of(trainer):
    (watch,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Gradients))
    return watch.steps


@pytest.fixture
def make(make_trainer, monkeypatch):
    monkeypatch.setattr(parts, "make_engine", LettersEngine)

    def make(on=None, environment=PatchyEnvironment, **options):
        given = {
            "per_device_train_batch_size": 16,
            "max_completion_length": 4,
            "max_steps": 2,
            "shuffle_dataset": False,
        }
        given |= {
            "logging_steps": 1,
            "disable_tqdm": True,
            "max_tokens_per_micro_batch": 200,
            "vllm_servers": ["http://localhost:1"],
            "overwrite": True,  # those that are compared use one folder
        }
        trainer = make_trainer(environment, update_while_playing=on, **{**given, **options})
        trainer.add_callback(Gradients())
        return trainer

    return make


def compare_logs(with_it, without):
    """Entries of the same iterations; the share that was updated early in each."""
    logs = [[entry for entry in log if "entropy" in entry] for log in (with_it, without)]
    for ours, theirs in zip(*logs, strict=True):
        assert ours.keys() - theirs.keys() == MORE_LOGGED and not theirs.keys() - ours.keys()
        for name, value in theirs.items():
            if name.startswith(DIFFERS) and name not in ("update/step_samples", "update/left_out_fraction"):
                continue
            rel = 0.3 if name == "vespo/phi_seq_mean" else 1e-4  # TRL takes its mean over rows
            assert ours[name] == pytest.approx(value, rel=rel, abs=1e-6, nan_ok=True), name
    return [entry["update/while_playing_fraction"] for entry in logs[0]]


LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
TWO_SLICES = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 8}


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("dapo", {"beta": 0.1}),
        ("grpo", {"beta": 0.0, "token_layout": "padded"}),
        ("bnpo", {"beta": 0.1, **TWO_SLICES}),
        *(
            pytest.param(loss_type, options, marks=pytest.mark.slow)
            for loss_type in ("cispo", "vespo", "sapo", "dr_grpo", "luspo")
            for options in ({"beta": 0.0, "token_layout": "packed"}, {"beta": 0.1, **TWO_SLICES})
        ),
        pytest.param("dapo", {"branch_share": 0.5}, marks=pytest.mark.slow),
        pytest.param("dapo", {"importance_sampling_level": "sequence"}, marks=pytest.mark.slow),
        pytest.param(
            "dapo", {"mask_truncated_completions": True, "state_key_ignores": ["numbers"]}, marks=pytest.mark.slow
        ),
        pytest.param("dapo", {"beta": 0.1, "peft_config": LORA, "disable_tqdm": False}, marks=pytest.mark.slow),
        pytest.param("bnpo", {"max_steps": 5, "gradient_checkpointing": True, "bf16": True}, marks=pytest.mark.slow),
    ],
)
def test_the_same_gradient_and_log(make, loss_type, options):
    """Ragged groups, episodes that break, groups that are all paid the same."""
    trainers = [make(on, loss_type=loss_type, **options) for on in (None, False)]
    for trainer in trainers:
        trainer.train()
    with_it, without = trainers
    assert with_it.while_playing and not without.while_playing
    for early, late in zip(gradients_of(with_it), gradients_of(without), strict=True):
        assert late.norm() > 1e-3
        assert (early - late).norm() / late.norm() < (0.02 if options.get("bf16") else 1e-5)
    logs = [trainer.state.log_history for trainer in trainers]
    if not options.get("bf16"):
        fractions = compare_logs(*logs)
        assert all(0 < fraction < 1 for fraction in fractions[options.get("token_layout") != "padded" :])
    entries = [entry for entry in logs[0] if "entropy" in entry]
    assert max(entry["episode/error_rate"] for entry in entries) > 0
    assert 0 < min(entry["episode/success_rate"] for entry in entries) < 1


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "g2po-rollout"]


def test_an_engine_that_fails(make):
    """What it raises comes out with its traceback, no thread goes on, and the next rollout has no old gradient."""
    trainer = make(token_layout="padded")
    poll = trainer.player.actor.engine.poll

    def fail_when_learned(timeout):
        if trainer.while_playing.early._load.micro_batches:
            raise OSError("no server is left")
        return poll(timeout)

    trainer.player.actor.engine.poll = fail_when_learned
    with pytest.raises(OSError, match="no server is left") as raised:
        trainer.train()
    assert "fail_when_learned" in "".join(traceback.format_tb(raised.value.__traceback__)) and not threads()
    assert any(p.grad is not None for p in trainer.model.parameters())
    trainer.while_playing.early.learn(lambda wait: None, [])
    assert all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.parametrize("how", ["the update raises", "Ctrl-C", "advantages differ"])
def test_what_ends_a_run_ends_the_rollout(make, how):
    """And leaves environments and engine for the next."""
    trainer = make(token_layout="padded", max_steps=1)
    early = trainer.while_playing.early
    if how == "the update raises":
        early.train = lambda rows: 1 / 0
        expected = pytest.raises(ZeroDivisionError)
    elif how == "Ctrl-C":
        early.train = lambda rows: os.kill(os.getpid(), signal.SIGINT) or time.sleep(300)
        expected = pytest.raises(KeyboardInterrupt)
    else:
        of_group = early.advantages_of
        early.advantages_of = lambda trajectories: of_group(trajectories) + 0.01
        expected = pytest.raises(RuntimeError, match="set update_while_playing=False")
    clock = time.perf_counter()
    with expected:
        trainer.train()
    assert not threads() and time.perf_counter() - clock < 200
    assert not trainer.player.pool._fleet.episodes and not trainer.player.actor.engine._is_open
    trainer.while_playing = None
    trajectories, _ = trainer.play([{"seed": 0}] * 4)
    assert all(trajectory.steps for trajectory in trajectories)


def test_environments_that_fail(make):
    trainer = make(environment=BreakingEnvironment)
    with pytest.raises(RuntimeError, match="the door is stuck"):
        trainer.train()
    assert not threads()


def test_who_has_ended_is_told_in_time():
    told, go = [], threading.Event()

    def play(on_end):
        on_end("first")
        assert go.wait(10)
        on_end("second")
        on_end("third")
        return "result"

    with Background(play) as rollout:
        assert rollout.ended() == ["first"] and rollout.ended(wait=False) == []
        go.set()
        while not rollout.is_over:
            told += rollout.ended()
    assert told == ["second", "third"] and rollout.result == "result" and not threads()


def test_a_thread_that_nobody_waits_for_is_interrupted():
    cleaned = []

    def play(on_end):
        try:
            while True:
                time.sleep(0.01)
        finally:
            cleaned.append(True)

    with pytest.raises(KeyError), Background(play):
        raise KeyError
    assert cleaned and not threads()


class Overridden(G2POTrainer):
    def estimate_advantages(self, graph, trajectories):
        return graph.returns


def test_refusals(tmp_path):
    """By default it is off where it cannot be; asked for, the error names the field, its value and what to do."""

    def choose(on, kind=G2POTrainer, engine=(True, True), streams=True, sharded=False, advantage_fn=None, **options):
        options = {"gradient_accumulation_steps": 1, "vllm_servers": ["http://localhost:1"], **options}
        trainer = object.__new__(kind)
        trainer.args = G2POConfig(str(tmp_path), use_cpu=True, bf16=False, update_while_playing=on, **options)
        engine = SimpleNamespace(streams=engine[0], takes_seeds=engine[1])
        trainer.player = SimpleNamespace(streams=streams, actor=SimpleNamespace(engine=engine))
        trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled, trainer.estimator_name = sharded, False, "mine"
        trainer.update = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"))
        trainer.iteration = trainer.ref_model = None
        trainer.credit = SimpleNamespace(of_group=None)
        return make_while_playing(trainer, advantage_fn)

    assert choose(None) and choose(True) and not choose(False)
    assert choose(True, vllm_servers=None, use_vllm=True) and not choose(None, vllm_servers=None, use_vllm=True)
    for situation, message in (
        ({"engine": (False, False)}, "computes them with the model that is trained.*set vllm_servers"),
        ({"engine": (True, False)}, "computes them with the model that is trained.*set vllm_servers"),
        ({"streams": False}, "does not stream: leave stream_rollouts at None"),
        ({"sharded": True}, "the model is sharded.*ddp.yaml"),
        ({"mini_batch_size": 8}, "mini_batch_size is 8.*set mini_batch_size=None"),
        ({"gradient_accumulation_steps": 1, "steps_per_generation": 2}, "set gradient_accumulation_steps=2"),
        ({"gradient_accumulation_steps": 2, "num_iterations": 2, "steps_per_generation": 1}, "Set num_iterations=1"),
        ({"rollouts_ahead": 1}, "rollouts_ahead is 1.*Set rollouts_ahead=0"),
        ({"refill_groups": 2}, "refill_groups is 2.*Set refill_groups=1"),
        ({"value_lambda": "auto"}, "value_lambda is 'auto'.*to a number"),
        ({"state_similarity": 0.8}, "state_similarity is 0.8.*Set state_similarity=1"),
        ({"advantage_fn": lambda graph: graph.returns}, "advantages come from mine.*choose an advantage_estimator"),
        ({"kind": Overridden}, "advantages come from mine"),
        ({"optim": "galore_adamw_layerwise"}, "makes its steps in the backward pass"),
        (
            {"vllm_servers": None, "use_vllm": True, "vllm_enable_sleep_mode": True},
            "set vllm_enable_sleep_mode=False",
        ),
    ):
        assert choose(None, **situation) is None
        with pytest.raises(ValueError, match=f"update_while_playing is True, and .*{message}"):
            choose(True, **situation)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_two_ranks_with_unequal_numbers_of_early_passes(tmp_path, tiny_model_dir, loss_type):
    """Three groups on two ranks, one of them on both; one rank computes nothing early."""
    found = {}
    for name, ranks, on in (("one", 1, "off"), ("two", 2, "on")):
        output = tmp_path / name
        output.mkdir()
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        run = programs.run_ranks(ranks, SCRIPT, tiny_model_dir, output, ranks, loss_type, on, env=env, timeout=240)
        assert run.returncode == 0, run.stderr[-3000:]
        weights = [torch.load(path, weights_only=True) for path in sorted(output.glob("weights-*.pt"))]
        found[name] = weights, [json.loads(path.read_text()) for path in sorted(output.glob("facts-*.json"))]
    (one,), (alone,) = found["one"]
    (first, second), (main, other) = found["two"]
    assert torch.equal(first, second)
    start = torch.cat([p.detach().flatten() for p in _model(tiny_model_dir).parameters()])
    assert (first - one).norm() / (one - start).norm() < 1e-5
    assert len(set(main["passes"])) == 2 and not other["passes"] and not alone["passes"], "the first has no layout yet"
    fractions = compare_logs(main["log"], alone["log"])
    assert fractions[0] == 0 and all(0.05 < fraction < 0.95 for fraction in fractions[1:])


def _model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)
