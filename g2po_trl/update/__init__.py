"""Update: turns step samples into a gradient.

It imports no other room, and knows neither environments nor graphs. It gives batches, their layouts for a forward
pass, the log-probabilities of old and reference policy, and PPO's critic.
"""
