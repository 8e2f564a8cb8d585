import json
import re

import numpy as np
import pytest
from letter_environment import LetterEnvironment
from transformers import HfArgumentParser

from g2po_trl import G2POError, PoolLimits, PromptTemplate
from g2po_trl.config import G2POConfig
from g2po_trl.config_validation import REFUSED
from g2po_trl.credit.estimators.registry import ESTIMATORS
from g2po_trl.runs.run_json import describe_run

CPU = {"bf16": False, "use_cpu": True, "report_to": "none"}


def make(tmp_path, **kwargs):
    return G2POConfig(str(tmp_path), **{**CPU, "per_device_train_batch_size": 8, **kwargs})


def test_paper_defaults(tmp_path):
    args = make(tmp_path)
    assert (args.gamma, args.step_advantage_weight, args.beta, args.invalid_action_penalty) == (0.95, 1.0, 0.01, 0.1)
    assert (args.learning_rate, args.num_generations, args.history_length, args.max_turns) == (1e-6, 8, 2, 50)
    assert args.eval_temperature == 0.4 and args.estimator_kwargs is None and args.scale_by_std
    assert args.loss_type == "dapo"


@pytest.mark.parametrize(
    ("strategy", "options", "field"),
    [
        ("dynamic", None, "rollout_strategy"),
        (["synchronous"], None, "rollout_strategy"),
        ("dynamic_sampling", {1: 2}, "rollout_strategy_kwargs"),
    ],
)
def test_rollout_strategy_that_is_unknown_is_refused(tmp_path, strategy, options, field):
    with pytest.raises(G2POError, match=field):
        make(tmp_path, rollout_strategy=strategy, rollout_strategy_kwargs=options)


def test_use_vllm_is_an_alias(tmp_path):
    assert make(tmp_path, use_vllm=True).engine == "vllm" and make(tmp_path, engine="vllm").use_vllm
    assert not make(tmp_path).use_vllm
    with pytest.raises(G2POError, match="use_vllm"):
        make(tmp_path, use_vllm=True, engine="vllm_servers")
    for options in ({"engine": "sglang"}, {"engine": ["vllm"]}):
        with pytest.raises(G2POError, match="engine is"):
            make(tmp_path, **options)
    with pytest.raises(G2POError, match="engine_kwargs"):
        make(tmp_path, engine="vllm", engine_kwargs={"merge": True})
    with pytest.raises(G2POError, match="merge_adapter"):
        make(tmp_path, engine="vllm", engine_kwargs={"merge_adapter": "no"})


def test_logging_steps_by_default_is_one_line_an_iteration(tmp_path):
    assert make(tmp_path, steps_per_generation=4).logging_steps == 4
    assert make(tmp_path, steps_per_generation=4, gradient_accumulation_steps=2).logging_steps == 2
    assert make(tmp_path, steps_per_generation=4, logging_steps=1).logging_steps == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_generations", 1),
        ("gamma", 0.0),
        ("gamma", 1.5),
        ("value_lambda", 1.5),
        ("value_lambda", "automatic"),
        ("step_advantage_weight", -1.0),
        ("invalid_action_penalty", -0.1),
        ("advantage_estimator", "ppo"),
        ("max_turns", 0),
        ("history_length", -1),
        ("max_prompt_length", 0),
        ("temperature", 0.0),  # the update divides by it, after the first rollout
        ("eval_temperature", -1.0),
        ("other_eval_temperatures", [1.0, -1.0]),
        ("other_eval_temperatures", [0.4]),  # eval_temperature
        ("other_eval_temperatures", [0.30000001, 0.3]),  # panels of one name
        ("other_eval_temperatures", [float("inf")]),
        ("other_eval_temperatures", 1.0),  # as in a YAML file
        ("max_error_rate", 1.1),
        ("max_completion_length", 0),
        ("max_tokens_per_micro_batch", 0),
        ("scale_rewards", "batch"),
        ("token_layout", "tree"),
        ("packed_row_tokens", 0),
        ("eval_top_p", 0.0),
        ("min_p", 1.5),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("eval_top_k", -1),
        ("min_valid_action_ratio", 2.0),
        ("min_success_of_best", -1.0),
        ("collapse_patience", 0),
        ("stop_sequences", "</action>"),
        ("stop_sequences", ["</action>", ""]),
    ],
)
@pytest.mark.filterwarnings("ignore:.* has no effect without")
def test_bad_values_name_field_and_value(tmp_path, field, value):
    with pytest.raises(G2POError, match=field):
        make(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            ("temperature", 1.7),
            ("do_sample", False),
            ("top_k", 3),
            ("repetition_penalty", 3.0),
            ("max_new_tokens", 2),
        ),
        *(("max_tokens", 2), ("stop", ["."]), ("seed", 3), ("eos_token_id", 7), ("num_return_sequences", 2)),
    ],
)
def test_generation_kwargs_that_repeat_a_field_are_refused(tmp_path, option, value):
    """The loss, run.json and tables go by the settings."""
    for given in ({option: value}, json.dumps({option: value})):
        with pytest.raises(G2POError, match=f"generation_kwargs has {option}"):
            make(tmp_path, generation_kwargs=given)


@pytest.mark.filterwarnings("ignore:.* has no effect without")
def test_other_generation_kwargs_are_taken(tmp_path):
    assert (
        make(tmp_path, generation_kwargs='{"no_repeat_ngram_size": 2}').generation_kwargs["no_repeat_ngram_size"] == 2
    )
    with pytest.raises(G2POError, match="vllm_structured_outputs_regex"):
        make(tmp_path, generation_kwargs={"structured_outputs": {}}, vllm_structured_outputs_regex="a")


def test_packed_rows_of_the_padded_layout_are_warned_about(tmp_path):
    with pytest.warns(UserWarning, match="packed_row_tokens"):
        make(tmp_path, token_layout="padded", packed_row_tokens=64)


def test_generation_batch_must_hold_whole_groups(tmp_path):
    with pytest.raises(G2POError, match="num_generations"):
        make(tmp_path, per_device_train_batch_size=6, num_generations=4)


USED = {
    "multi_objective_aggregation": "normalize_then_sum",
    "max_tool_calling_iterations": 3,
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.1,
}


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_options_without_meaning_are_refused(tmp_path, field):
    with pytest.raises(ValueError, match=field):
        make(tmp_path, **{field: USED.get(field, True)})


def test_no_top_p_is_as_in_trl(tmp_path):
    assert make(tmp_path, top_p=None).top_p == 1.0


def test_one_checkpoint_an_iteration(tmp_path):
    assert make(tmp_path, steps_per_generation=4).save_steps == 40, "6 GB each for a model of 0.5 B"
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 12, "save_strategy": "steps"}
    assert make(tmp_path, steps_per_generation=4, **best).save_steps == 12, "the best is a checkpoint"
    assert make(tmp_path, steps_per_generation=4, save_steps=12).save_steps == 12


def test_evaluations_are_as_often_as_log_lines(tmp_path):
    """transformers' rule, for the line an iteration that is the default here."""
    assert make(tmp_path, steps_per_generation=4, eval_strategy="steps").eval_steps == 4
    assert make(tmp_path, steps_per_generation=4, eval_strategy="steps", logging_steps=2).eval_steps == 2
    best = make(tmp_path, steps_per_generation=4, eval_strategy="steps", load_best_model_at_end=True)
    assert best.eval_steps == best.save_steps == 4
    assert make(tmp_path, steps_per_generation=4).eval_steps is None


def test_best_model_needs_checkpoints_at_evaluations(tmp_path):
    args = make(tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=12, steps_per_generation=4)
    assert args.metric_for_best_model == "success_rate" and args.greater_is_better
    assert args.load_best_model_at_end and args.save_steps == 12
    with pytest.raises(ValueError, match="save_steps is 5"):
        make(tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=12, save_steps=5)
    with pytest.raises(ValueError, match="load_best_model_at_end is True"):
        make(tmp_path, load_best_model_at_end=True)


@pytest.mark.parametrize(("given", "value"), [(0.5, 0.5), (0, 0.0), (1.0, 1.0)])
def test_value_lambda_is_a_number(tmp_path, given, value):
    assert make(tmp_path, value_lambda=given).value_lambda == value
    flags = ["--output_dir", str(tmp_path), "--value_lambda", str(given), "--use_cpu", "--bf16", "false"]
    assert HfArgumentParser(G2POConfig).parse_args_into_dataclasses(flags)[0].value_lambda == value


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 3.0),
        ({"rollout_strategy": "partial_rollouts"}, 1.0),
        ({"rollout_strategy": "partial_rollouts", "vllm_importance_sampling_mode": "token_mask"}, 3.0),
        ({"rollout_strategy": "partial_rollouts", "vllm_importance_sampling_clip_max": "2.5"}, 2.5),
        ({"vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_clip_min": 0.5}, None),
    ],
)
def test_the_largest_importance_weight(tmp_path, options, bound):
    assert make(tmp_path, **options).vllm_importance_sampling_clip_max == bound


def test_an_importance_weight_of_nothing(tmp_path):
    for value in (0, -1, "x"):
        with pytest.raises(G2POError, match="vllm_importance_sampling_clip_max"):
            make(tmp_path, vllm_importance_sampling_clip_max=value)


WEIGHTED = [
    {"use_vllm": True},
    {"engine": "vllm_servers", "engine_kwargs": {"servers": ["http://10.0.0.2:8000"]}},
    {"rollout_strategy": "partial_rollouts"},
]
RESHAPING = [
    *({"presence_penalty": 1.5}, {"frequency_penalty": -1}, {"logit_bias": {5: -100}}, {"typical_p": 0.2}),
    *({"top_h": 1.0}, {"epsilon_cutoff": 1e-3}, {"eta_cutoff": 1e-3}, {"suppress_tokens": [3]}, {"num_beams": 2}),
    *({"begin_suppress_tokens": [0]}, {"bad_words": ["a"]}, {"bad_words_ids": [[1]]}, {"sequence_bias": {(1,): 2.0}}),
    *({"no_repeat_ngram_size": 1}, {"encoder_repetition_penalty": 2.0}, {"min_new_tokens": 1}, {"min_tokens": 2}),
    *({"forced_eos_token_id": 0}, {"remove_invalid_values": True}, {"guidance_scale": 0}, {"token_healing": True}),
    *({"allowed_token_ids": [0]}, {"structured_outputs": {"regex": "a"}}, {"prompt_lookup_num_tokens": 2}),
    *({"exponential_decay_length_penalty": [3, 1.1]}, {"watermarking_config": {"bias": 2.0}}, {"dola_layers": "low"}),
    *({"logits_processors": ["mine"]}, {"an_option_of_the_next_version": 0}),
]
NEUTRAL = [
    *({"logit_bias": None}, {"bad_words_ids": None}, {"forced_eos_token_id": None}, {"top_h": None}),
    *({"remove_invalid_values": False}, {"structured_outputs": None}, {"use_cache": False}, {"max_time": 60.0}),
    *({"renormalize_logits": True}, {"skip_special_tokens": False}),
]


@pytest.mark.parametrize("engine", WEIGHTED, ids=lambda engine: next(iter(engine)))
def test_what_reshapes_the_distribution_is_refused_with_importance_weights(tmp_path, engine):
    for option in RESHAPING:
        (name,) = option
        for given in (option, json.dumps(option)) if name != "sequence_bias" else (option,):
            with pytest.raises(G2POError, match=name):
                make(tmp_path, **engine, generation_kwargs=given)
        make(tmp_path, **engine, generation_kwargs=option, vllm_importance_sampling_correction=False)
        assert make(tmp_path, generation_kwargs=option).generation_kwargs == option, "the weights are 1"
    for field in ({"repetition_penalty": 1.1}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.9}):
        with pytest.raises(G2POError, match=next(iter(field))):
            make(tmp_path, **engine, **field)
    for option in NEUTRAL:
        assert make(tmp_path, **engine, generation_kwargs=option).generation_kwargs == option
    make(tmp_path, **engine, min_p=0.0, top_k=None, generation_kwargs=None)


@pytest.mark.filterwarnings("ignore:.* has no effect without")
def test_a_regex_of_completions_is_refused_with_importance_weights(tmp_path):
    for engine in WEIGHTED[:2]:
        with pytest.raises(ValueError, match="^vllm_structured_outputs_regex='a' with .*biased"):
            make(tmp_path, **engine, vllm_structured_outputs_regex="a")
        options = {**engine, "vllm_importance_sampling_correction": False}
        assert make(tmp_path, **options, vllm_structured_outputs_regex="a").vllm_structured_outputs_regex == "a"


def test_a_top_k_of_none_is_off(tmp_path):
    """transformers takes 50 where it is left open."""
    assert make(tmp_path, top_k=None).training_sampling().top_k == 0


def test_vllm_options(tmp_path):
    args = make(tmp_path, use_vllm=True, max_prompt_length=100, max_completion_length=20)
    assert args.vllm_max_model_length == 120
    with pytest.raises(ValueError, match="vllm_max_model_length is 110"):
        make(tmp_path, use_vllm=True, max_prompt_length=100, max_completion_length=20, vllm_max_model_length=110)
    with pytest.raises(ValueError, match=r"top_p=0.9.*biased"):
        make(tmp_path, use_vllm=True, top_p=0.9)
    make(tmp_path, use_vllm=True, top_p=0.9, vllm_importance_sampling_correction=False)
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
        with pytest.raises(G2POError, match=name):
            make(tmp_path, **{name: True})


@pytest.mark.parametrize(
    ("estimator", "field", "value"),
    [
        ("grpo", "step_advantage_weight", 0.5),
        ("gigpo", "value_lambda", 0.5),
        ("hgpo", "step_advantage_weight", 0.5),
        ("crbc", "step_advantage_weight", 0.5),
    ],
)
def test_options_an_estimator_does_not_use_are_refused(tmp_path, estimator, field, value):
    with pytest.raises(G2POError, match=field):
        make(tmp_path, advantage_estimator=estimator, **{field: value})
    make(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_turns", 2.5, "set it to a whole number"),
        ("max_turns", True, "set it to a whole number"),
        ("eval_seed", "0", "set it to a whole number"),
        ("gamma", "0.9", "set it to a number"),
        ("step_advantage_weight", float("inf"), "set it to a number"),
        ("overwrite", "false", "set it to a truth value"),
        ("logging_steps", 0, "set it to a number above 0, or to None"),
        ("save_steps", 0, "set it to a number above 0, or to None"),
        ("top_p", 2.0, "set it to a number above 0 and at most 1"),
        ("state_key_ignores", "numbers", "set it to a list of numbers, list_order, case"),
        ("stop_sequences", [1], "set it to a list of strings"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* has no effect without")
def test_values_of_another_type_or_out_of_range_are_named(tmp_path, field, value, message):
    HfArgumentParser(G2POConfig)  # changes the types of the class's fields
    with pytest.raises(ValueError, match=f"^{field} is {re.escape(repr(value))}: {message}"):
        make(tmp_path, **{field: value})


def test_numbers_of_numpy_are_taken_as_python_s(tmp_path):
    args = make(
        tmp_path,
        max_turns=np.int64(3),
        gamma=np.float64(0.5),
        save_trajectories=np.bool_(False),
        estimator_kwargs={"edge_centric": np.bool_(False)},
    )
    assert [type(one) for one in (args.max_turns, args.gamma, args.save_trajectories)] == [int, float, bool]
    assert args.estimator_kwargs == {"edge_centric": False} and args.make_estimator().keywords["edge_centric"] is False


def test_crbc_has_a_discount_of_its_own(tmp_path):
    with pytest.raises(G2POError, match="gamma"):
        make(tmp_path, advantage_estimator="crbc", gamma=0.5)
    make(tmp_path, advantage_estimator="gigpo", gamma=0.5)


@pytest.mark.parametrize(
    ("estimator", "options", "message"),
    [
        ("graphgpo", {"omega": 1.0}, "omega is 1.0: set it above 0 and below 1"),
        ("graphgpo", {"omega": "0.2"}, "estimator_kwargs has omega='0.2': set it to a number"),
        ("hgpo", {"depth_exponent": -1.0}, "depth_exponent is -1.0: set it to 0 or more"),
        ("crbc", {"gamma": 0.0}, "gamma is 0.0: set it above 0 and at most 1"),
        ("crbc", {"least_std": -0.1}, "least_std -0.1: set both to 0 or more"),
        ("g2po", {"episode_statistics": "group"}, "episode_statistics is 'group'; set it to 'trajectory'"),
        ("g2po", {"edge_centric": "no"}, "estimator_kwargs has edge_centric='no': set it to a truth value"),
        (
            "g2po",
            {"edge_center": False},
            "does not have; did you mean 'edge_centric'.*options are episode_statistics, n",
        ),
        ("g2po", {"omega": 0.1}, "has 'omega', which advantage_estimator='g2po' does not have; its options are"),
        ("rloo", {"episode_statistics": "step"}, "advantage_estimator='rloo' does not have; it has no options"),
        ("crbc", '{"value_weight": NaN}', "has value_weight=nan: set it to a number"),
        ("crbc", {"least_std": float("inf")}, "has least_std=inf: set it to a number"),
        ("g2po", {1: 2}, "has 1, which advantage_estimator='g2po' does not have"),
        ("g2po", {"step_weight": 0.5}, "estimator_kwargs has 'step_weight': set step_advantage_weight instead"),
        ("g2po", "edge_centric", "estimator_kwargs is 'edge_centric': write"),
    ],
)
def test_estimator_kwargs_that_an_estimator_refuses_are_named(tmp_path, estimator, options, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, advantage_estimator=estimator, estimator_kwargs=options)


@pytest.mark.parametrize(
    ("estimator", "options", "bound"),
    [
        ("g2po", None, {}),
        ("g2po", '{"edge_centric": false}', {"edge_centric": False}),
        ("graphgpo", {"omega": 0.2}, {"omega": 0.2}),
        ("hgpo", {"depth_exponent": 0}, {"depth_exponent": 0, "history_length": 2}),
        ("crbc", {"value_weight": 1.0, "gamma": 0.95, "least_std": 0.1}, {"value_weight": 1.0, "gamma": 0.95}),
    ],
)
def test_estimator_kwargs_are_bound_beside_the_settings_of_the_run(tmp_path, estimator, options, bound):
    args = make(tmp_path, advantage_estimator=estimator, estimator_kwargs=options, invalid_action_penalty=0.2)
    function = args.make_estimator()
    assert function.func is ESTIMATORS[estimator].function and function.keywords.items() >= bound.items()
    assert function.keywords["invalid_action_penalty"] == 0.2
    assert ("step_weight" in function.keywords) == (estimator in ("g2po", "graphgpo"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_environment_workers", value) for value in (0, 1.5)),
        *(("environment_load_timeout", value) for value in (0, "9", float("nan"))),
        ("environment_variables", "HOME"),
    ],
)
def test_limits_of_workers_out_of_range_are_named(tmp_path, name, value):
    with pytest.raises(ValueError, match=name):
        make(tmp_path, **{name: value})
    with pytest.raises(G2POError, match=name):
        PoolLimits(**{name: value})


def test_limits_of_workers_are_the_options_of_an_evaluation(tmp_path):
    args = make(tmp_path, environment_load_timeout=9, environment_worker_memory_mb=2.0)
    template = PromptTemplate("{observation}", "{observation}")
    play = describe_run(args, "no/model", LetterEnvironment, template, "g2po", {}, "window", {}, "")["play"]
    assert (play["environment_load_timeout"], play["environment_worker_memory_mb"]) == (9, 2.0)
    assert play["environment_worker_resets"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps is 0: set it to 1 or more, or to -1"),
        ({"num_train_epochs": 0}, "num_train_epochs"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "warmup_steps is 5: .* 'constant_with_warmup'"),
        ({"optim": "adalomo"}, "optim is 'adalomo': it steps in the backward pass"),
        (
            {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"},
            "optim is 'galore_adamw_layerwise'",
        ),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config is {'split_batches': True}"),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config is {'dispatch_batches': True}"),
        ({"activation_checkpointing_kwargs": {"every_n_layers": 2}}, "and on again without every_n_layers"),
        ({"save_strategy": "best"}, "save_strategy"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "steps"}, "learning_rate is 1e-06: .*min_lr=0.001"),
        (
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "eval_strategy": "steps",
                "lr_scheduler_kwargs": {"mode": "min"},
            },
            "lr_scheduler_kwargs",
        ),
    ],
)
def test_what_the_training_loop_would_ignore_or_do_wrongly_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **options)


def test_options_that_would_have_a_wrong_effect_are_not_said_to_have_none(tmp_path):
    with pytest.raises(G2POError, match="neftune_noise_alpha is 5.0, which cannot be used"):
        make(tmp_path, neftune_noise_alpha=5.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("log_multimodal", False), ("entropy_target", 0.3), ("eval_do_concat_batches", False), ("eval_delay", 3)],
)
def test_harmless_options_without_effect_are_warned_about(tmp_path, name, value):
    with pytest.warns(UserWarning, match=f"{name}.* no effect"):
        make(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("metric", "greater"),
    [("success_rate", True), ("eval_turns", False), ("eval_b_error_rate", False), ("score", True)],
)
def test_fewer_turns_and_errors_are_better(tmp_path, metric, greater):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "metric_for_best_model": metric}
    args = make(tmp_path, **best)
    assert args.greater_is_better is greater
    assert make(tmp_path, **best, greater_is_better=not greater).greater_is_better is not greater
