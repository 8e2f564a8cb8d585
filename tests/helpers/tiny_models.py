"""The bundled tiny models, as exams play them."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from g2po_trl import EnvironmentPool, PoolLimits, Sampling
from g2po_trl.teach.exam import SuccessEvaluation


def exam_of(folder, environment, rows, template, history_length, max_turns, temperature=1.0, length=24):
    """Return the summary of one episode for each row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampling = Sampling(temperature, max_completion_length=length)
    exam = SuccessEvaluation(environment, rows, template, history_length, max_turns, sampling, target=1.0, every=1)
    with EnvironmentPool(environment, PoolLimits(1)) as pool:
        return exam.evaluate(model, AutoTokenizer.from_pretrained(folder), pool, seed=0)[0]
