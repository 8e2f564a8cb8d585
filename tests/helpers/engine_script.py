"""Two ranks with unequal numbers of prompts, through TRL's own vLLM wrapper in server mode with a server of rhymes.
Then requests with seeds, in a model that both ranks share.
"""

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
        return {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": [[[-0.1 * token] for token in completion] for completion in completions],
        }


class SharedModel:
    """Stands in for the vLLM that two ranks share, which TRL calls on both with the prompts of both."""

    class SamplingParams(SimpleNamespace):
        def clone(self):
            return SharedModel.SamplingParams(**vars(self))

    caching = SimpleNamespace(enable_prefix_caching=False)
    llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=caching))

    def generate(self, prompts, sampling_params, **kwargs):
        self.seen = [(prompt[-1], params.seed) for prompt, params in zip(prompts, sampling_params, strict=True)]
        return []


def shared_model(engine_of, rank: int) -> None:
    """Both ranks ask with the same seeds, in evaluation with those of the panel, though their random states differ."""
    llm = SharedModel()
    wrapper = SimpleNamespace(mode="colocate", llm=llm, tensor_parallel_size=2)

    def generate(prompts, images, num_generations):
        gathered = [None, None]
        torch.distributed.all_gather_object(gathered, prompts)
        llm.generate(sum(gathered, []), sampling_params=SharedModel.SamplingParams(temperature=0.5))
        return prompts, [[7]] * len(prompts), [[[0.0]]] * len(prompts), None

    wrapper.generate = generate
    engine = engine_of(wrapper)
    torch.manual_seed(rank)
    numbers = [2, 1]
    prompts = [[1, 100 + 10 * rank + i] for i in range(numbers[rank])]
    engine.generate(prompts, Sampling(temperature=0.5), [5 + 10 * rank + i for i in range(numbers[rank])])
    assert llm.seen == [(100, 5), (101, 6), (110, 15), (0, 0)], llm.seen
    for state in (rank, 0):  # states that part, and states that are the same, as they are at first
        torch.manual_seed(state)
        engine.generate(prompts, Sampling())
        seen = [None, None]
        torch.distributed.all_gather_object(seen, llm.seen)
        assert seen[0] == seen[1] and len({seed for _, seed in llm.seen}) == 4, seen


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    vllm = VLLMGeneration.__new__(VLLMGeneration)  # __init__ would connect
    vllm.mode, vllm.accelerator, vllm.vllm_client = "server", accelerator, EchoServer()
    vllm.tensor_parallel_size, vllm.logprobs, vllm.structured_outputs_regex = 1, 0, None
    vllm.temperature, vllm.top_p, vllm.top_k, vllm.min_p = 1.0, 1.0, 0, None
    vllm.repetition_penalty, vllm.max_completion_length, vllm.model = 1.0, 8, None
    tokenizer, model = SimpleNamespace(pad_token_id=0), torch.nn.Linear(1, 1)

    def engine_of(wrapper) -> VLLMEngine:
        args = SimpleNamespace(generation_kwargs=None, seed=0)
        return VLLMEngine(EngineParts(args, tokenizer, [7], accelerator, lambda: model, None, vllm=wrapper))

    engine = engine_of(vllm)
    for numbers in ([3, 1], [0, 2], [1, 0], [0, 0], [2, 2]):
        prompts = [[1, 100 + 10 * rank + i] for i in range(numbers[rank])]
        completions = engine.generate(prompts, Sampling(temperature=0.5))
        assert [one.ids for one in completions] == [[prompt[-1]] * 3 + [7] for prompt in prompts], (rank, completions)
        assert all(one.complete and len(one.logprobs) == 4 for one in completions)
    assert EchoServer.calls == (4 if rank == 0 else 0), "nothing is asked when no rank has a prompt"
    shared_model(engine_of, rank)
    accelerator.end_training()  # its threads may abort Python as it exits
