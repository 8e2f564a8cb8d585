"""Update: step samples in, a gradient out.

It contains micro-batches, their layouts for the forward pass, and the log-probabilities of the old and the reference
policy. It imports `trajectory` and `utils` only.
"""
