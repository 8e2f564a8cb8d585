import json
from dataclasses import fields

import numpy as np
import pytest
from letter_environment import LetterEnvironment
from refusals import refused
from transformers import HfArgumentParser
from trl import GRPOConfig

from g2po_trl import PromptTemplate
from g2po_trl.cli.parser import Parser
from g2po_trl.config import G2POConfig
from g2po_trl.config_validation import inherited, inherited_help
from g2po_trl.credit.estimators.registry import ESTIMATORS
from g2po_trl.runs.run_json import describe_run

HfArgumentParser(G2POConfig)  # changes the types of the class's fields, as a command line does
CPU = {"bf16": False, "use_cpu": True, "report_to": "none"}


def make(tmp_path, **kwargs):
    return G2POConfig(**{"output_dir": str(tmp_path), **CPU, "per_device_train_batch_size": 8, **kwargs})


def test_paper_defaults(tmp_path):
    args = make(tmp_path)
    assert (args.gamma, args.step_advantage_weight, args.beta, args.invalid_action_penalty) == (0.95, 1.0, 0.01, 0.1)
    assert (args.learning_rate, args.num_generations, args.history_length, args.max_turns) == (1e-6, 8, 2, 50)
    assert args.eval_temperature == 0.4 and args.estimator_kwargs is None and args.scale_by_std
    assert args.loss_type == "dapo"


def test_numbers_of_a_sweep_become_plain_ones(tmp_path):
    swept = {"max_turns": np.int64(5), "max_steps": np.int64(3), "gamma": np.float32(0.5), "overwrite": np.bool_(True)}
    args = make(tmp_path, **swept)
    assert {name: getattr(args, name) for name in swept} == swept and json.dumps(args.to_dict())


SERVED = {"use_vllm": True, "max_prompt_length": 100, "max_completion_length": 20}
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 12}
DYNAMIC = {"rollout_strategy": "dynamic_sampling"}
ESTIMATOR, GENERATION, ENGINE = "estimator_kwargs", "generation_kwargs", "engine_kwargs"
USED = {"max_tool_calling_iterations": 3, "top_entropy_quantile": 0.2, "entropy_coef": 0.1}
BAD = [  # options, and the field that is refused
    *(({field: value}, field) for field, values in {
        **{"num_generations": [1], "gamma": [0.0, 1.5, "0.9"], "value_lambda": [1.5, "automatic"]},
        **{"step_advantage_weight": [-1.0, float("inf")], "invalid_action_penalty": [-0.1], "beta": [-1.0]},
        **{"advantage_estimator": ["ppo"], "history_length": [-1], "max_prompt_length": [0], "eval_steps": [0]},
        "temperature": [0.0],  # the update divides by it, after the first rollout
        # The second is eval_temperature; panels of one name; a number, as in a YAML file.
        "other_eval_temperatures": [[1.0, -1.0], [0.4], [0.30000001, 0.3], [float("inf")], 1.0],
        **{"max_error_rate": [1.1], "max_completion_length": [0], "max_tokens_per_micro_batch": [0], "top_p": [2.0]},
        **{"scale_rewards": ["batch"], "token_layout": ["packed"], "eval_top_p": [0.0], "min_p": [1.5], "top_k": [-1]},
        **{"eval_top_k": [-1], "repetition_penalty": [0.0], "min_valid_action_ratio": [2.0], "eval_seed": ["0"]},
        **{"stop_sequences": ["</action>", ["</action>", ""], [1]], "overwrite": ["false"], "logging_steps": [0]},
        "learning_rate": [-1e-6, float("nan"), float("inf"), "1e-6", None],  # YAML reads 1e-6 as a text
        **{"save_steps": [0], "seed": [-1, 2**32, "0"], "state_key_ignores": ["numbers", ["colour"]]},
        **{"num_environment_workers": [0, 1.5], "environment_load_timeout": [0, "9", float("nan")], "max_steps": [0]},
        **{"environment_variables": ["HOME"], "engine": ["sglang", ["vllm"]], "report_to": ["wandbb"]},
        **{"rollout_strategy": ["dynamic", ["synchronous"]], "mini_batch_size": [0], "num_train_epochs": [0, "3"]},
        **{"max_turns": [0, 2.5, True], "eval_temperature": [-1.0], "max_grad_norm": [None, "1.0"]},
        "log_trajectories_every": [2],  # no tracker has tables
        **{"save_strategy": ["best"], "optim": ["adalomo"]},
        "load_best_model_at_end": [True],  # without evaluations
        "accelerator_config": [{"split_batches": True}, {"dispatch_batches": True}],
        ENGINE: ["{", "[1]"],
        **{field: ["{", "[1]"] for field in inherited("mapping")},
        **{field: ["x", 0, -1] for field in ("vllm_importance_sampling_clip_max", *inherited("choices"))},
        **{field: [0, 1.5] for field, within in inherited("within").items() if within == "[1, inf)"},
        **{field: [USED.get(field, True)] for field in inherited("refused")},
    }.items() for value in values),
    # The loss, run.json and tables go by the settings.
    *(({GENERATION: given}, GENERATION) for name, value in {
        **{"temperature": 1.7, "do_sample": False, "top_k": 3, "repetition_penalty": 3.0, "max_new_tokens": 2},
        **{"max_tokens": 2, "stop": ["."], "seed": 3, "eos_token_id": 7, "num_return_sequences": 2},
    }.items() for given in ({name: value}, json.dumps({name: value}))),
    *(({**DYNAMIC, "rollout_strategy_kwargs": wrong}, "rollout_strategy_kwargs") for wrong in (
        *({1: 2}, {"batches": 1}, {"max_generation_batches": 2.5}),
    )),
    ({**SERVED, ENGINE: {"merge_adapters": True}}, ENGINE),
    *(({ESTIMATOR: wrong}, ESTIMATOR) for wrong in (
        *({1: 2}, {"edge_centric": "no"}, {"edge_center": False}, "edge_centric"),
    )),
    ({"advantage_estimator": "graphgpo", ESTIMATOR: {"omega": "0.2"}}, ESTIMATOR),
    ({"advantage_estimator": "rloo", ESTIMATOR: {"episode_statistics": "step"}}, ESTIMATOR),
    ({"use_vllm": True, "engine": "vllm_server"}, "use_vllm"),
    ({"mini_batch_size": 64, "steps_per_generation": 2}, "steps_per_generation"),
    ({"mini_batch_size": 64, "generation_batch_size": 32}, "steps_per_generation"),
    ({"mini_batch_size": 64, "gradient_accumulation_steps": 2}, "steps_per_generation"),
    ({"mini_batch_size": 64, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
     "gradient_accumulation_steps"),
    ({"state_key": "similar", "advantage_estimator": "grpo"}, "state_key"),
    ({"per_device_train_batch_size": 6, "num_generations": 4}, None),  # TRL's: no whole groups
    ({"advantage_estimator": "grpo", "step_advantage_weight": 0.5}, "step_advantage_weight"),
    ({"advantage_estimator": "gigpo", "value_lambda": 0.5}, "value_lambda"),
    ({"advantage_estimator": "hgpo", "step_advantage_weight": 0.5}, "step_advantage_weight"),
    ({"advantage_estimator": "crbc", "gamma": 0.5}, "gamma"),  # it has its own
    ({**SERVED, "vllm_max_model_length": 110}, "vllm_max_model_length"),
    *(({**SERVED, **reshaping}, next(iter(reshaping))) for reshaping in (
        *({"top_p": 0.9}, {"repetition_penalty": 1.1}, {"top_k": 5}, {"min_p": 0.1}),
        {"vllm_structured_outputs_regex": "a"},
    )),
    ({GENERATION: {"structured_outputs": {}}, "vllm_structured_outputs_regex": "a"}, "vllm_structured_outputs_regex"),
    ({**BEST, "save_steps": 5}, "save_steps"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "warmup_steps"),
    *(({"lr_scheduler_type": name, "eval_strategy": "steps"}, "lr_scheduler_type") for name in (
        *("reduce_lr_on_plateau", "greedy"),
    )),
    ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, "optim"),
    ({"output_dir": ""}, "output_dir"),
    # Values of options of parts.
    ({"state_key": "similar:1.5"}, "state_key"),
    ({**DYNAMIC, "rollout_strategy_kwargs": {"max_generation_batches": 1}}, "max_generation_batches"),
    ({**SERVED, ENGINE: {"merge_adapter": "no"}}, "merge_adapter"),
    ({"advantage_estimator": "graphgpo", ESTIMATOR: {"omega": 1.0}}, "omega"),
    *(({"advantage_estimator": "crbc", ESTIMATOR: wrong}, ESTIMATOR) for wrong in (
        *({"least_std": float("inf")}, '{"value_weight": NaN}', {"step_weight": 0.5}),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("options", "field"), BAD, ids=str)
@pytest.mark.filterwarnings("ignore:.* has no effect without")
def test_what_cannot_be_is_refused_by_its_field(tmp_path, options, field):
    with refused(field):
        make(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [{"log_multimodal": False}, {"entropy_target": 0.3}, {"eval_do_concat_batches": False}, {"eval_delay": 3}],
)
def test_harmless_options_without_effect_are_warned_about(tmp_path, options):
    with pytest.warns(UserWarning, match=next(iter(options))):
        make(tmp_path, **options)


def test_the_help_of_inherited_options_says_what_happens_here(tmp_path):
    """TRL's own help of these is about `GRPOTrainer`."""
    own = {one.name for one in fields(G2POConfig) if "within" in one.metadata}
    assert set(inherited_help()) <= {one.name for one in fields(GRPOConfig)} - own
    shown = " ".join(Parser((G2POConfig,)).help_with({}).split())
    for name, reason in (inherited("refused") | inherited("no_effect")).items():
        assert f": {reason}.".replace(" ", "") in shown.replace(" ", ""), name
    assert "`None`: 1." in shown and make(tmp_path).num_generations_eval == 1
    assert "the entire batch, as recommended" not in shown


FOUR = {"steps_per_generation": 4}
METRIC = "metric_for_best_model"
EVALUATED = {**FOUR, "eval_strategy": "steps"}
DERIVED = [  # options, and what follows from them
    *(({"use_vllm": True}, {"engine": "vllm"}), ({"engine": "vllm"}, {"use_vllm": True}), ({}, {"use_vllm": False})),
    # A log line an iteration, and evaluations as often as log lines, as transformers has it.
    *((FOUR, {"logging_steps": 4, "eval_steps": None}), ({**FOUR, "logging_steps": 1}, {"logging_steps": 1})),
    ({**FOUR, "gradient_accumulation_steps": 2}, {"logging_steps": 2}),
    *((EVALUATED, {"eval_steps": 4}), ({**EVALUATED, "logging_steps": 2}, {"eval_steps": 2})),
    ({"mini_batch_size": 64, "eval_strategy": "steps"}, {"logging_steps": 1, "eval_steps": 1, "save_steps": 10}),
    ({"mini_batch_size": 64}, {"optimizer_steps_per_iteration": 1}),
    # 6 GB each for a model of 0.5 B; the best is a checkpoint of an evaluation.
    *((FOUR, {"save_steps": 40}), ({**FOUR, "save_steps": 12}, {"save_steps": 12})),
    ({**FOUR, **BEST, "save_strategy": "steps"}, {"save_steps": 12}),
    ({**EVALUATED, "load_best_model_at_end": True}, {"eval_steps": 4, "save_steps": 4}),
    ({**FOUR, **BEST}, {"metric_for_best_model": "success_rate", "load_best_model_at_end": True, "save_steps": 12}),
    ({**BEST, "eval_steps": 0.3, "save_steps": 0.1}, {"save_steps": 0.1}),  # 0.3 % 0.1 is not 0
    # So do scripts of TRL leave `top_p` out; transformers takes a `top_k` of 50 where it is left open.
    ({"top_p": None, "top_k": None}, {"top_p": 1.0, "top_k": 0}),
    ({"max_grad_norm": float("inf")}, {}),  # logs the norm alone
    # Fewer turns and errors are better, unless it is said otherwise.
    *(({**BEST, **metric}, {"greater_is_better": greater}) for metric, greater in (
        *(({METRIC: "success_rate"}, True), ({METRIC: "eval_turns"}, False), ({METRIC: "eval_b_error_rate"}, False)),
        *(({METRIC: "score"}, True), ({METRIC: "success_rate", "greater_is_better": False}, False)),
        ({METRIC: "eval_turns", "greater_is_better": True}, True),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("options", "derived"), DERIVED, ids=str)
def test_what_follows_from_options(tmp_path, options, derived):
    args = make(tmp_path, **options)
    assert {name: getattr(args, name) for name in derived} == derived


RESHAPING = [
    *({"presence_penalty": 1.5}, {"logit_bias": {5: -100}}, {"typical_p": 0.2}, {"suppress_tokens": [3]}),
    *({"num_beams": 2}, {"sequence_bias": {(1,): 2.0}}, {"min_tokens": 2}, {"remove_invalid_values": True}),
    *({"guidance_scale": 0}, {"structured_outputs": {"regex": "a"}}, {"an_option_of_the_next_version": 0}),
]
NEUTRAL = [
    *({"logit_bias": None}, {"bad_words_ids": None}, {"forced_eos_token_id": None}, {"top_h": None}),
    *({"remove_invalid_values": False}, {"structured_outputs": None}, {"use_cache": False}, {"max_time": 60.0}),
    *({"renormalize_logits": True}, {"skip_special_tokens": False}),
]


def test_what_reshapes_the_distribution_is_refused_with_importance_weights(tmp_path):
    for option in RESHAPING:
        (name,) = option
        for given in (option, json.dumps(option)) if name != "sequence_bias" else (option,):
            with refused(name):
                make(tmp_path, use_vllm=True, generation_kwargs=given)
        make(tmp_path, use_vllm=True, generation_kwargs=option, vllm_importance_sampling_correction=False)
        assert make(tmp_path, generation_kwargs=option).generation_kwargs == option, "the weights are 1"
    for option in NEUTRAL:
        assert make(tmp_path, use_vllm=True, generation_kwargs=option).generation_kwargs == option
    make(tmp_path, use_vllm=True, min_p=0.0, top_k=None, generation_kwargs=None)
    uncorrected = {**SERVED, "vllm_importance_sampling_correction": False}
    assert make(tmp_path, **uncorrected, top_p=0.9, vllm_structured_outputs_regex="a").vllm_max_model_length == 120


@pytest.mark.parametrize(
    ("name", "options", "bound"),
    [
        ("g2po", None, {}),
        ("g2po without A_EC", '{"edge_centric": false}', {"edge_centric": False}),
        ("g2po without group aggregation, value_lambda 0.5", {"aggregate": False}, {"aggregate": False}),
        ("graphgpo", {"omega": 0.2}, {"omega": 0.2}),
        ("hgpo", {"depth_exponent": 0}, {"depth_exponent": 0, "history_length": 2}),
        ("crbc", {"value_weight": 1.0, "gamma": 0.95, "least_std": 0.1}, {"value_weight": 1.0, "gamma": 0.95}),
    ],
)
def test_estimator_kwargs_are_bound_beside_the_settings_of_the_run(tmp_path, name, options, bound):
    own = {"estimator_kwargs": options, "invalid_action_penalty": 0.2, "value_lambda": 0.5 if "0.5" in name else 1.0}
    estimator = name.split()[0]
    args = make(tmp_path, advantage_estimator=estimator, **own)
    function = args.make_estimator()
    assert function.func is ESTIMATORS[estimator].function and function.keywords.items() >= bound.items()
    assert function.keywords["invalid_action_penalty"] == 0.2 and args.estimator_name == name
    assert ("step_weight" in function.keywords) == (estimator in ("g2po", "graphgpo"))


def test_what_an_evaluation_plays_with_is_in_the_description_of_a_run(tmp_path):
    args = make(tmp_path, environment_load_timeout=9, environment_worker_memory_mb=2.0)
    template = PromptTemplate("{observation}", "{observation}")
    play = describe_run(args, LetterEnvironment, template, "g2po", {"history": "window"})["play"]
    assert (play["environment_load_timeout"], play["environment_worker_memory_mb"]) == (9, 2.0)
    assert (play["temperature"], play["history"], play["max_turns"]) == (0.4, "window", 50)
    assert "num_environment_workers" not in play and play["environment_worker_resets"] is None
