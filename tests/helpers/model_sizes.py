"""Sizes of a small and of a large model, as a layout reads them from `model.config`."""


class SmallModel:
    hidden_size, intermediate_size, num_attention_heads = 128, 384, 2


class LargeModel:
    hidden_size, intermediate_size, num_attention_heads = 1536, 8960, 12
