"""A vLLM plugin (entry point `vllm.general_plugins`): makes vLLM's CPU build fit to be trained with.

vLLM loads it in each of its processes. On a GPU it does nothing. On a CPU, vLLM's linear layers pack their weights for
speed and empty the originals, so new weights cannot be loaded into them; and it would run float32 models in bfloat16,
while they are trained in float32. And a request with a seed whose prompt is read in parts would end it: a CPU's random
generator cannot be taken back by one draw. That is so in vLLM's first model runner; its second has no generators, but
hashes seed and position.
"""


def register() -> None:
    """Apply the changes; vLLM calls it in each of its processes."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.model_executor.layers import utils

    def keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep_weights
    dtypes = [torch.float32, torch.bfloat16, torch.float16]  # the first is what "auto" makes of float32
    type(current_platform).supported_dtypes = property(lambda platform: dtypes)
    _make_generators_rewindable()


def _make_generators_rewindable() -> None:
    import torch
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    class Rewindable(torch.Generator):
        """A generator that starts over when it is rewound.

        vLLM rewinds the draw after a part of a prompt. Nothing was drawn before, unless a request lost its place in
        the cache and is computed again.
        """

        def get_offset(self) -> int:
            return 4  # of one draw, as on a GPU

        def set_offset(self, offset: int) -> None:
            self.manual_seed(self.initial_seed())

    complete = CachedRequestState.__post_init__

    def with_generator(state: CachedRequestState) -> None:
        complete(state)
        if state.generator is not None:
            state.generator = Rewindable().manual_seed(state.generator.initial_seed())

    CachedRequestState.__post_init__ = with_generator
