"""Two ranks with unequal numbers of prompts, through TRL's own vLLM wrapper in server mode with a server of rhymes."""

from types import SimpleNamespace

import torch
from accelerate import Accelerator
from trl.generation.vllm_generation import VLLMGeneration

from g2po_trl.generation import VLLMEngine
from g2po_trl.sampling import Sampling


class EchoServer:
    """Answers every prompt with its last token, three times, and end-of-turn."""

    calls = 0

    def generate(self, prompts, n, **options):
        assert n == 1 and options["temperature"] == 0.5, options
        assert options["generation_kwargs"]["stop_token_ids"] == [7]
        EchoServer.calls += 1
        replies = [[prompt[-1]] * 3 + [7] for prompt in prompts]
        return {
            "prompt_ids": prompts,
            "completion_ids": replies,
            "logprobs": [[[-0.1 * token] for token in reply] for reply in replies],
        }


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    vllm = VLLMGeneration.__new__(VLLMGeneration)  # __init__ would connect
    vllm.mode, vllm.accelerator, vllm.vllm_client = "server", accelerator, EchoServer()
    vllm.tensor_parallel_size, vllm.logprobs, vllm.structured_outputs_regex = 1, 0, None
    vllm.repetition_penalty, vllm.max_completion_length, vllm.model = 1.0, 8, None
    trainer = SimpleNamespace(
        vllm_generation=vllm,
        accelerator=accelerator,
        eos_token_ids=[7],
        args=SimpleNamespace(stop_sequences=None, generation_kwargs=None),
        processing_class=SimpleNamespace(pad_token_id=0),
        model=torch.nn.Linear(1, 1),
    )
    engine = VLLMEngine(trainer)
    for numbers in ([3, 1], [0, 2], [1, 0], [0, 0], [2, 2]):
        prompts = [[1, 100 + 10 * rank + i] for i in range(numbers[rank])]
        replies = engine.generate(prompts, Sampling(temperature=0.5))
        assert [reply.ids for reply in replies] == [[prompt[-1]] * 3 + [7] for prompt in prompts], (rank, replies)
        assert all(reply.complete and len(reply.logprobs) == 4 for reply in replies)
    assert EchoServer.calls == (4 if rank == 0 else 0), "nothing is asked when no rank has a prompt"
    accelerator.end_training()  # its threads may abort Python as it exits
