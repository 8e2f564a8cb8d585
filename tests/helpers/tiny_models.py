"""The bundled tiny models, as exams play them."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_trl import EnvironmentPool, PoolLimits
from g2po_trl.teach.exam import SuccessEvaluation, TeachingArguments


def exam_of(folder, environment, rows, template, history_length, max_turns, temperature=1.0, length=24):
    """Return the summary of one episode for each row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = TeachingArguments(
        temperature=temperature,
        max_completion_length=length,
        history_length=history_length,
        max_turns=max_turns,
    )
    exam = SuccessEvaluation(environment, rows, template, options)
    with EnvironmentPool(environment, PoolLimits(1)) as pool:
        return exam.evaluate(model, AutoTokenizer.from_pretrained(folder), pool, seed=0)[0]
