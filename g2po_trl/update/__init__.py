"""Update: step samples in, a gradient out.

It imports `trajectory` and `utils` only. It makes micro-batches, their layouts for the forward pass, and the
log-probabilities of the old and the reference policy.
"""
