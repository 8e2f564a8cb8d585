"""The real trainer on a tiny model and the letter game, with the options every test of it shares."""

from datasets import Dataset
from letter_environment import LETTER_PROMPT, LetterEnvironment

from g2po_trl import G2POConfig, G2POTrainer

TASKS = Dataset.from_list([{"seed": seed} for seed in range(8)])
OPTIONS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_turns": 6,
    "max_completion_length": 2,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "num_environment_workers": 1,
    "disable_tqdm": False,
    "seed": 0,
}


def make_config(output_dir, config_class=G2POConfig, **options):
    return config_class(str(output_dir), **{**OPTIONS, **options})


def make_letter_trainer(
    model,
    output_dir,
    environment=LetterEnvironment,
    advantage_fn=None,
    state_key=None,
    dataset=TASKS,
    eval_dataset=None,
    peft_config=None,
    quantization_config=None,
    processing_class=None,
    **options,
):
    """`options` are fields of `G2POConfig`."""
    return G2POTrainer(
        model=str(model),
        args=make_config(output_dir, **options),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        environment_factory=environment,
        prompt_template=LETTER_PROMPT,
        advantage_fn=advantage_fn,
        state_key=state_key,
        peft_config=peft_config,
        quantization_config=quantization_config,
        processing_class=processing_class,
    )
