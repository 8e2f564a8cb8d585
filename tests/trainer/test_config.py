import pytest
from refusals import refused
from transformers import HfArgumentParser

from g2po_trl.config import G2POConfig
from g2po_trl.config_validation import inherited
from g2po_trl.credit.estimators.registry import ESTIMATORS

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
        "other_eval_temperatures": [[1.0, -1.0], [0.4], 1.0],  # the second is eval_temperature
        **{"max_error_rate": [1.1], "max_completion_length": [0], "max_tokens_per_micro_batch": [0], "top_p": [2.0]},
        **{"scale_rewards": ["batch"], "token_layout": ["packed"], "min_p": [1.5], "top_k": [-1]},
        **{"repetition_penalty": [0.0], "min_valid_action_ratio": [2.0], "eval_seed": ["0"]},
        **{"stop_sequences": ["</action>", ["</action>", ""]], "overwrite": ["false"], "logging_steps": [0]},
        "learning_rate": [-1e-6, float("nan"), "1e-6", None],  # YAML reads 1e-6 as a text
        **{"save_steps": [0], "seed": [2**32], "state_key_ignores": ["numbers", ["colour"]], "max_steps": [0]},
        **{"num_environment_workers": [0, 1.5], "environment_load_timeout": [0, float("nan")]},
        **{"environment_variables": ["HOME"], "engine": ["sglang", ["vllm"]], "report_to": ["wandbb"]},
        **{"rollout_strategy": ["dynamic"], "mini_batch_size": [0], "num_train_epochs": ["3"]},
        **{"max_turns": [0, 2.5, True], "eval_temperature": [-1.0], "max_grad_norm": [None]},
        "log_trajectories_every": [2],  # no tracker has tables
        **{"save_strategy": ["best"], "optim": ["adalomo"], "output_dir": [""]},
        "load_best_model_at_end": [True],  # without evaluations
        "accelerator_config": [{"split_batches": True}],
        ENGINE: ["{", "[1]"],
        **{field: ["{"] for field in inherited("mapping")},
        **{field: ["x", -1] for field in ("vllm_importance_sampling_clip_max", *inherited("choices"))},
        **{field: [0, 1.5] for field, within in inherited("within").items() if within == "[1, inf)"},
        **{field: [USED.get(field, True)] for field in inherited("refused")},
    }.items() for value in values),
    # The loss, run.json and tables go by the settings.
    *(({GENERATION: {name: value}}, GENERATION) for name, value in {
        **{"temperature": 1.7, "do_sample": False, "top_k": 3, "repetition_penalty": 3.0, "max_new_tokens": 2},
        **{"max_tokens": 2, "stop": ["."], "seed": 3, "eos_token_id": 7, "num_return_sequences": 2},
    }.items()),
    ({GENERATION: '{"temperature": 1.7}'}, GENERATION),
    ({**DYNAMIC, "rollout_strategy_kwargs": {"batches": 1}}, "rollout_strategy_kwargs"),
    ({**DYNAMIC, "rollout_strategy_kwargs": {"max_generation_batches": 1}}, "max_generation_batches"),
    ({**SERVED, ENGINE: {"merge_adapters": True}}, ENGINE),
    *(({ESTIMATOR: wrong}, ESTIMATOR) for wrong in ({1: 2}, {"edge_centric": "no"}, {"edge_center": False})),
    ({"advantage_estimator": "graphgpo", ESTIMATOR: {"omega": 1.0}}, "omega"),
    ({"advantage_estimator": "rloo", ESTIMATOR: {"episode_statistics": "step"}}, ESTIMATOR),
    ({"advantage_estimator": "crbc", ESTIMATOR: '{"value_weight": NaN}'}, ESTIMATOR),
    ({"use_vllm": True, "engine": "vllm_server"}, "use_vllm"),
    ({"mini_batch_size": 64, "steps_per_generation": 2}, "steps_per_generation"),
    ({"mini_batch_size": 64, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
     "gradient_accumulation_steps"),
    ({"state_key": "similar", "advantage_estimator": "grpo"}, "state_key"),
    ({"state_key": "similar:1.5"}, "state_key"),
    ({"per_device_train_batch_size": 6, "num_generations": 4}, None),  # TRL's: no whole groups
    ({"advantage_estimator": "grpo", "step_advantage_weight": 0.5}, "step_advantage_weight"),
    ({"advantage_estimator": "gigpo", "value_lambda": 0.5}, "value_lambda"),
    ({"advantage_estimator": "crbc", "gamma": 0.5}, "gamma"),  # it has its own
    ({**SERVED, "vllm_max_model_length": 110}, "vllm_max_model_length"),
    *(({**SERVED, name: value}, name) for name, value in {
        **{"top_p": 0.9, "repetition_penalty": 1.1, "top_k": 5, "min_p": 0.1, "vllm_structured_outputs_regex": "a"},
    }.items()),
    ({GENERATION: {"structured_outputs": {}}, "vllm_structured_outputs_regex": "a"}, "vllm_structured_outputs_regex"),
    ({**BEST, "save_steps": 5}, "load_best_model_at_end"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "warmup_steps"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "lr_scheduler_type"),
    ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, "optim"),
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


FOUR = {"steps_per_generation": 4}
EVALUATED = {**FOUR, "eval_strategy": "steps"}
DERIVED = [  # options, and what follows from them
    *(({"use_vllm": True}, {"engine": "vllm"}), ({"engine": "vllm"}, {"use_vllm": True}), ({}, {"use_vllm": False})),
    # A log line an iteration, and evaluations as often as log lines, as transformers has it.
    *((FOUR, {"logging_steps": 4, "eval_steps": None}), ({**FOUR, "logging_steps": 1}, {"logging_steps": 1})),
    ({**FOUR, "gradient_accumulation_steps": 2}, {"logging_steps": 2}),
    ({**EVALUATED, "logging_steps": 2}, {"eval_steps": 2}),
    ({"mini_batch_size": 64, "eval_strategy": "steps"}, {"logging_steps": 1, "eval_steps": 1, "save_steps": 10}),
    # 6 GB each for a model of 0.5 B; the best is a checkpoint of an evaluation.
    *((FOUR, {"save_steps": 40}), ({**FOUR, "save_steps": 12}, {"save_steps": 12})),
    ({**EVALUATED, "load_best_model_at_end": True}, {"eval_steps": 4, "save_steps": 4}),
    ({**FOUR, **BEST}, {"metric_for_best_model": "success_rate", "load_best_model_at_end": True, "save_steps": 12}),
    ({**BEST, "eval_steps": 0.3, "save_steps": 0.1}, {"save_steps": 0.1}),  # 0.3 % 0.1 is not 0
    # So do scripts of TRL leave `top_p` out; transformers takes a `top_k` of 50 where it is left open.
    ({"top_p": None, "top_k": None}, {"top_p": 1.0, "top_k": 0}),
    ({"report_to": "tensorboard"}, {"log_trajectories_every": 10}),  # it has tables
    # Fewer turns and errors are better, unless it is said otherwise.
    *(({**BEST, "metric_for_best_model": name}, {"greater_is_better": greater}) for name, greater in {
        **{"success_rate": True, "score": True, "eval_turns": False, "eval_b_error_rate": False},
    }.items()),
    ({**BEST, "metric_for_best_model": "turns", "greater_is_better": True}, {"greater_is_better": True}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "derived"), DERIVED, ids=str)
def test_what_follows_from_options(tmp_path, options, derived):
    args = make(tmp_path, **options)
    assert {name: getattr(args, name) for name in derived} == derived


RESHAPING = [
    *({"presence_penalty": 1.5}, {"logit_bias": {5: -100}}, {"num_beams": 2}, {"min_tokens": 2}),
    *({"guidance_scale": 0}, {"structured_outputs": {"regex": "a"}}, {"an_option_of_the_next_version": 0}),
]
NEUTRAL = [
    *({"logit_bias": None}, {"forced_eos_token_id": None}, {"remove_invalid_values": False}, {"max_time": 60.0}),
    *({"structured_outputs": None}, {"use_cache": False}, {"renormalize_logits": True}),
]


def test_what_reshapes_the_distribution_is_refused_with_importance_weights(tmp_path):
    for option in RESHAPING:
        with refused(*option):
            make(tmp_path, use_vllm=True, generation_kwargs=option)
        make(tmp_path, use_vllm=True, generation_kwargs=option, vllm_importance_sampling_correction=False)
        assert make(tmp_path, generation_kwargs=option).generation_kwargs == option, "the weights are 1"
    for option in NEUTRAL:
        assert make(tmp_path, use_vllm=True, generation_kwargs=option).generation_kwargs == option
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
