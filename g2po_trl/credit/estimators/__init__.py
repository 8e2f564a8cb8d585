"""Estimators: pure functions from a state graph to one advantage per step, one file each; `registry` lists them.

Each term A_* is a set of numbers, centred, and divided by their standard deviation if `scale_by_std`. It is 0 in a set
of one, or of equal values. Steps of trajectories with outcome `"error"` or `"lost"` have advantage 0 and belong to no
set.

`episode_statistics="trajectory"` (default) are the papers' equations: each episode counts once, and
`invalid_action_penalty` is subtracted from the advantage of a step whose completion lacks the required format. The
papers do not specify where the penalty goes. If it were subtracted from the score, it would be divided by the standard
deviation of a group that may differ in nothing else, and could grow a hundredfold.

`episode_statistics="step"` with a penalty of 0.1 reproduces the released code of G2PO: mean and standard
deviation of A_EP are over steps, so that long episodes weigh more, and the penalty is subtracted from the step's score
in A_EP and from the value of the next node in A_NC.
"""
