"""A vLLM plugin (entry point `vllm.general_plugins`): makes vLLM's CPU build fit to be trained with.

vLLM loads it in each of its processes. On a GPU it does nothing. On a CPU, vLLM's linear layers pack their weights for
speed and empty the originals, so new weights cannot be loaded into them; and it would run float32 models in bfloat16,
while they are trained in float32.
"""


def register() -> None:
    """Called by vLLM."""
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
