"""A model whose gradient is not finite where a test says so."""

import torch


def spoil(model, is_spoiled):
    """Make the gradient of layer 1's queries NaN, as cuDNN's attention does, where the ids that pass are such."""
    passing = []

    def note(module, arguments, named):
        passing[:] = [named["input_ids"]]

    def make_nan(module, arguments, output):
        if output.requires_grad and is_spoiled(*passing):
            output.register_hook(lambda gradient: gradient * torch.nan)

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    model.model.layers[1].self_attn.q_proj.register_forward_hook(make_nan)
