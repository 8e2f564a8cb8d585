"""PPO: its equations by hand, a critic that does not depend on padding, resumption. Metrics: `tests/runs`."""

from functools import partial

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from letter_environment import SuicidalEnvironment
from letter_trainer import played_in
from refusals import refused
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2Model

from g2po_trl import G2POConfig
from g2po_trl.ppo.critic import Critic, clipped_value_loss
from g2po_trl.ppo.gae import gae, whiten


def test_gae_by_hand():
    rewards, values = np.array([0.0, 10.0, 1.0]), np.array([2.0, 4.0, 3.0])
    # lengths 2 and 1: delta = [0 + 0.5*4 - 2, 10 - 4, 1 - 3] = [0, 6, -2]; A_1 = 0 + 0.5 * 0.5 * 6
    np.testing.assert_allclose(gae(rewards, values, np.array([2, 1]), 0.5, 0.5), [1.5, 6.0, -2.0])


def test_gae_with_lambda_one_is_return_minus_value():
    rng = np.random.default_rng(0)
    lengths = np.array([4, 0, 1, 7])
    rewards, values = rng.normal(size=12), rng.normal(size=12)
    found, start = gae(rewards, values, lengths, 0.9, 1.0), 0
    for length in lengths:
        for j in range(start, start + length):
            rest = rewards[j : start + length]
            assert found[j] == pytest.approx((0.9 ** np.arange(len(rest)) * rest).sum() - values[j])
        start += length


def test_whitening_of_nothing():
    np.testing.assert_array_equal(whiten(np.array([3.0]), np.array([True])), [0.0])
    np.testing.assert_array_equal(whiten(np.array([2.0, 2.0, 9.0]), np.array([True, True, False]))[:2], [0.0, 0.0])


def test_clipped_value_loss_by_hand():
    values, old, returns = (torch.tensor(x) for x in ([3.0, 1.2, -4.0], [1.0, 1.0, 1.0], [4.0, 4.0, 4.0]))
    # towards the return beyond the range: the clipped 1.5 counts; within: the value; away from it: the value
    expected = [0.5 * 2.5**2, 0.5 * 2.8**2, 0.5 * 8.0**2]
    torch.testing.assert_close(clipped_value_loss(values, old, returns, 0.5), torch.tensor(expected))
    torch.testing.assert_close(clipped_value_loss(values, old, returns, None)[0], torch.tensor(0.5))


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 300, size=length).tolist() for length in lengths]


@pytest.fixture
def make_critic(tiny_model_dir):
    return partial(Critic, str(tiny_model_dir), Accelerator(cpu=True), learning_rate=1e-3)


def test_values_do_not_depend_on_padding_or_micro_batches(make_critic):
    prompts = prompts_of([5, 17, 3, 40])
    one, many = (make_critic(max_tokens=size) for size in (1000, 1))
    for critic in (one, many):
        torch.nn.init.constant_(critic.model.head.weight, 0.1)
    together = one.values(prompts)
    np.testing.assert_allclose(together, many.values(prompts), atol=1e-5)
    np.testing.assert_allclose(together, [one.values([prompt])[0] for prompt in prompts], atol=1e-5)
    assert together.std() > 0.01


def test_an_update_does_not_depend_on_micro_batches(make_critic):
    prompts, returns = prompts_of([5, 17, 3, 40, 8]), np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    weights = []
    for size in (1000, 1):
        critic = make_critic(max_tokens=size)
        critic.fit(prompts, np.zeros(5), returns, None, 2, 2, np.random.default_rng(0))
        weights.append(critic.model.head.weight.detach().clone())
    assert weights[0].abs().max() > 1e-4
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-7)


def test_a_body_with_dropout_is_fitted_without_it(tmp_path):
    """Values that are their own returns have no loss."""
    GPT2Model(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2)).save_pretrained(tmp_path)  # dropout 0.1
    critic, prompts = Critic(str(tmp_path), Accelerator(cpu=True)), [[3, 5, 7], [2, 9]]
    torch.nn.init.normal_(critic.model.head.weight)
    values = critic.values(prompts)
    fitted = critic.fit(prompts, values, values, 0.5, 1, 1, np.random.default_rng(0))
    assert fitted["loss"] < 1e-9 and fitted["grad_norm"] < 1e-4


def test_ppo_resumes_bit_for_bit(make_ppo, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": None}
    whole = make_ppo(**options)
    whole.train()
    again = make_ppo(**options)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for one, other in ((whole.model, again.model), (whole.critic.model, again.critic.model)):
        for name, weight in one.state_dict().items():
            assert torch.equal(weight, other.state_dict()[name]), name
    saved = load_file(tmp_path / "out" / "checkpoint-4" / "critic.safetensors")
    assert torch.equal(saved["head.weight"], whole.critic.model.head.weight)


def test_error_trajectories_teach_the_critic_nothing(make_ppo):
    trainer = make_ppo(SuicidalEnvironment, max_steps=1, shuffle_dataset=False)
    seen, fit = [], trainer.critic.fit
    trainer.critic.fit = lambda prompts, *args, **kwargs: seen.append(len(prompts)) or fit(prompts, *args, **kwargs)
    trainer.train()
    played = played_in(trainer)
    finished = [t for t in played if t.outcome != "error"]
    assert len(finished) < len(played) and seen == [sum(len(t.steps) for t in finished)]


BAD = {"gae_lambda": 1.5, "critic_learning_rate": 0.0, "critic_epochs": 0, "value_clip_range": 0.0}
BAD |= {"advantage_estimator": "g2po", "step_advantage_weight": 0.5, "state_key": "similar"}


def test_what_ppo_does_not_take_is_refused(make_ppo):
    for name, value in BAD.items():
        with refused(name):
            make_ppo(**{name: value})
    with pytest.raises(TypeError, match="PPOConfig"):
        make_ppo(config_class=G2POConfig)
    with refused("advantage_fn"):
        make_ppo(advantage_fn=lambda graph: graph.returns)
