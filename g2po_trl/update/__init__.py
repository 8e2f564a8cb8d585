"""Update: step samples go in, a gradient comes out.

It imports no other room, and knows neither environments nor graphs. It gives batches, the layouts in which they pass
through a model, log-probabilities to hold them against, and PPO's critic.
"""
