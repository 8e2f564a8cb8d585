"""Two ranks with unequal numbers of prompts, through TRL's own vLLM wrapper in server mode with a server of rhymes."""

from types import SimpleNamespace

import torch
from accelerate import Accelerator
from trl.generation.vllm_generation import VLLMGeneration

from g2po_trl.engines.base import EngineParts
from g2po_trl.engines.sampling import Sampling
from g2po_trl.engines.trl_vllm import VLLMEngine


class EchoServer:
    """Answers every prompt with its last token, three times, and end-of-turn."""

    calls = 0

    def generate(self, prompts, n, generation_kwargs, **options):
        assert n == 1 and generation_kwargs["temperature"] == 0.5, generation_kwargs
        assert generation_kwargs["stop_token_ids"] == [7]
        EchoServer.calls += 1
        completions = [[prompt[-1]] * 3 + [7] for prompt in prompts]
        logprobs = [[[-0.1 * token] for token in completion] for completion in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    vllm = VLLMGeneration.__new__(VLLMGeneration)  # __init__ would connect
    vllm.mode, vllm.accelerator, vllm.vllm_client = "server", accelerator, EchoServer()
    vllm.tensor_parallel_size, vllm.logprobs, vllm.structured_outputs_regex = 1, 0, None
    vllm.temperature, vllm.top_p, vllm.top_k, vllm.min_p = 1.0, 1.0, 0, None
    vllm.repetition_penalty, vllm.max_completion_length, vllm.model = 1.0, 8, None
    args, tokenizer = SimpleNamespace(generation_kwargs=None, seed=0), SimpleNamespace(pad_token_id=0)
    model = torch.nn.Linear(1, 1)
    engine = VLLMEngine(EngineParts(args, tokenizer, [7], accelerator, lambda: model, None, vllm=vllm))
    for numbers in ([3, 1], [0, 2], [1, 0], [0, 0], [2, 2]):
        prompts = [[1, 100 + 10 * rank + i] for i in range(numbers[rank])]
        completions = engine.generate(prompts, Sampling(temperature=0.5))
        assert [one.ids for one in completions] == [[prompt[-1]] * 3 + [7] for prompt in prompts], (rank, completions)
        assert all(one.complete and len(one.logprobs) == 4 for one in completions)
    assert EchoServer.calls == (4 if rank == 0 else 0), "nothing is asked when no rank has a prompt"
    accelerator.end_training()  # its threads may abort Python as it exits
