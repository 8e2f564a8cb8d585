"""Branches in the graph: values that mean the same, episodes' comparison untouched, and where to branch."""

import numpy as np
import pytest

from g2po_trl import StateGraph, Step, Trajectory, edge_advantage, episode_advantage, g2po, gigpo, grpo, hgpo, rloo
from g2po_trl.experimental.branching.rules import all_failed, least_visited

GAMMA = 0.5


def episode(names, reward=0.0, parent=None, start=0, outcome=None):
    outcome = outcome or ("success" if reward else "failure")
    return Trajectory("task", [Step(name, "go") for name in names], reward, outcome, parent=parent, start=start)


def graph_of(*groups, **options):
    return StateGraph.from_groups(groups, **{"gamma": GAMMA, **options})


def test_a_step_before_a_branch_has_the_mean_of_its_ways_on():
    """From c the parent failed in 2 more steps; one branch succeeded in 1, another failed. From b, a third in 3."""
    root, other = episode("abcd"), episode("ax", 8.0)
    branches = [episode("c", 8.0, 0, 2), episode("cd", 0.0, 0, 2), episode("bce", 8.0, 0, 1)]
    graph = graph_of([root, other, *branches])
    at_c = np.mean([0.0, 8 * 0.5, 0.0])  # of the parent itself, and of the two branches
    at_b = np.mean([0.5 * at_c, 8 * 0.125])
    np.testing.assert_allclose(graph.returns[:4], [0.5 * at_b, 0.5 * at_c, 0.0, 0.0])
    np.testing.assert_allclose(graph.returns[4:6], [2.0, 4.0])
    np.testing.assert_allclose(graph.returns[6:], [4.0, 0.0, 0.0, 1.0, 2.0, 4.0])
    own = graph.next_lambda_returns  # where node values are not used
    np.testing.assert_allclose(own[:4], [at_b, at_c, 0.0, 0.0])
    np.testing.assert_allclose(own[4:6], [4.0, 8.0])
    value = dict(zip("abcdxe", graph.node_values))
    assert value["c"] == pytest.approx(np.mean([0.0, 4.0, 0.0, 2.0])) and value["a"] == pytest.approx(
        np.mean([0.5 * at_b, 2.0])
    )
    plain = graph_of([root, other])
    np.testing.assert_array_equal(plain.returns, [0, 0, 0, 0, 2.0, 4.0])


def test_with_bootstrapped_values_a_branch_is_transitions_like_others():
    """At lambda 0: c leads to d, e or an end; b to c, twice; and nothing else is known of a and b."""
    graph = graph_of([episode("abcd"), episode("c", 8.0, 0, 2), episode("bce", 8.0, 0, 1)], value_lambda=0.0)
    value = dict(zip("abcde", graph.node_values))
    assert value["d"] == 0 and value["e"] == 4.0
    assert value["c"] == pytest.approx(0.5 * np.mean([0.0, 8.0, 4.0]))
    assert value["b"] == pytest.approx(0.5 * value["c"]) and value["a"] == pytest.approx(0.5 * value["b"])


@pytest.mark.parametrize("statistics", ["trajectory", "step"])
def test_episodes_are_compared_without_branches(statistics):
    roots = [episode("abc"), episode("abd", 8.0), episode("ab")]
    branches = [episode("bd", 8.0, 0, 1), episode("x", 8.0, 2, 1), episode("c", 8.0, 0, 2)]
    plain, branched = graph_of(roots), graph_of([*roots, *branches])
    options = {"invalid_action_penalty": 0.1, "episode_statistics": statistics}
    number = plain.num_steps
    for estimator in (episode_advantage, grpo):
        found = estimator(branched, **options)
        np.testing.assert_array_equal(found[:number], estimator(plain, **options))
        assert not found[number:].any()
    np.testing.assert_array_equal(rloo(branched)[:number], rloo(plain))
    assert not rloo(branched)[number:].any()
    for estimator in (g2po, gigpo):
        assert estimator(branched)[number:].any(), "what branches teach is which steps to take"


@pytest.mark.parametrize("seed", range(5))
def test_episodes_are_compared_without_branches_whatever_these_are(seed):
    """Random groups: branches of branches, won and lost ones, errors among them."""
    draws, groups = np.random.default_rng(seed), []
    for _ in range(6):
        group = []
        for number in range(9):
            longer = [m for m, t in enumerate(group) if len(t.steps) > 1]
            parent = int(draws.choice(longer)) if number > 4 and longer else None
            start = 0 if parent is None else int(draws.integers(1, len(group[parent].steps)))
            names = draws.choice(list("abcde"), draws.integers(1, 7)).tolist()
            outcome = "error" if draws.random() < 0.1 else None
            group.append(episode(names, 8.0 * (draws.random() < 0.4), parent, start, outcome))
        groups.append(group)
    roots = [[t for t in group if t.parent is None] for group in groups]
    of_root = np.concatenate([np.full(len(t.steps), t.parent is None) for group in groups for t in group])
    for value_lambda in (1.0, 0.5):
        plain, branched = (graph_of(*some, value_lambda=value_lambda) for some in (roots, groups))
        for estimator in (episode_advantage, grpo, rloo):
            found = estimator(branched)
            np.testing.assert_array_equal(found[of_root], estimator(plain))
            assert not found[~of_root].any() and found[of_root].any()


def test_other_groups_are_not_touched_by_branches():
    other = [episode("abc", 8.0), episode("ab")]
    plain = graph_of(other, [episode("abc"), episode("abd")])
    branched = graph_of(other, [episode("abc"), episode("abd"), episode("c", 8.0, 0, 2)])
    np.testing.assert_array_equal(g2po(plain)[:5], g2po(branched)[:5])
    assert edge_advantage(branched)[5:].any() and not edge_advantage(plain)[5:].any()


def test_a_branch_that_failed_to_be_played_counts_nowhere():
    roots = [episode("abcd"), episode("abe", 8.0)]
    lost = episode("", 0.0, 0, 2, outcome="error")
    np.testing.assert_array_equal(graph_of([*roots, lost]).returns, graph_of(roots).returns)
    np.testing.assert_array_equal(g2po(graph_of([*roots, lost])), g2po(graph_of(roots)))


@pytest.mark.parametrize(("parent", "start"), [(0, 3), (0, 9), (1, 1), (5, 1)])
def test_what_is_no_branch(parent, start):
    with pytest.raises(ValueError, match=f"has parent {parent} and start {start}"):
        graph_of([episode("abc"), episode("b", 0.0, parent, start)])
    with pytest.raises(ValueError, match="a branch has both"):
        episode("a", parent=0)


def walks(count, seed, loops, starts=None, limit=60):
    """Random walks over states 1 to 3, from 1 or from `starts`, that end on either side; the right one pays 8. Without
    `loops` a walk that does not go right ends."""
    draws, played = np.random.default_rng(seed), []
    for state in starts if starts is not None else [1] * count:
        names = []
        while 0 < state < 4 and len(names) < limit:
            names.append(str(state))
            forward = draws.random() < 0.3 + 0.1 * state
            state = state + 1 if forward else (state - 1 if loops else 0)
        played.append((names, 8.0 * (state >= 4)))
    return played


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("value_lambda", [1.0, 0.5, 0.0])
def test_values_with_branches_are_those_of_plain_episodes(loops, value_lambda):
    """Of one large group, branches drawn at random from its states; against many more episodes from the beginning."""
    many = [episode(*walk) for walk in walks(30_000, 1, loops)]
    truth = graph_of(many, gamma=0.9)
    wanted = dict(zip("123", truth.node_values))
    roots = [episode(*walk) for walk in walks(3000, 2, loops)]
    draws = np.random.default_rng(3)
    visits = [(m, p) for m, t in enumerate(roots) for p in range(1, len(t.steps))]
    points = [visits[place] for place in draws.integers(len(visits), size=3000)]
    again = walks(0, 4, loops, [int(roots[m].steps[p].observation) for m, p in points])
    branches = [episode(*walk, m, p) for walk, (m, p) in zip(again, points)]
    found = graph_of([*roots, *branches], gamma=0.9, value_lambda=value_lambda)
    for name, value in zip("123", found.node_values):  # nodes are numbered by their first visit
        assert value == pytest.approx(wanted[name], abs=0.12), name


def test_the_least_visited_states_of_failed_groups():
    failed = [episode("abcd"), episode("abe"), episode("aba")]
    won = [episode("axy"), episode("az", 8.0)]
    graph = graph_of(won, failed)
    np.testing.assert_array_equal(all_failed(graph), [False, True])
    # c, e (third steps), then d; b was visited three times; a is where episodes begin, also the second time.
    assert least_visited(graph, 9) == [(2, 2), (3, 2), (2, 3), (2, 1)]
    assert least_visited(graph, 2) == [(2, 2), (3, 2)]
    assert least_visited(graph_of(won), 5) == [] and least_visited(graph, 0) == []


def test_nothing_branches_from_branches_or_errors():
    roots = [episode("abc"), episode("abdef", outcome="error"), episode("agh")]
    graph = graph_of([*roots, episode("bcx", 0.0, 0, 1)])
    assert {m for m, _ in least_visited(graph, 99)} == {0, 2}


def test_hgpo_knows_what_came_before_a_branch():
    """A branch from c, that came from b, is compared at c with those that came to c from b, and not with the third."""
    group = [episode("abcd"), episode("abc", 8.0), episode("axc", 4.0), episode("ce", 8.0, 0, 2)]
    (depth_0, depth_1) = (hgpo(graph_of(group), scale_by_std=False, history_length=n) for n in (0, 1))
    graph = graph_of(group)
    at_c = np.flatnonzero(graph.node == 2)
    returns = graph.returns[at_c] / GAMMA
    np.testing.assert_allclose(depth_0[at_c], returns - returns.mean())
    from_b = [0, 1, 3]
    wanted = (returns - returns.mean())[from_b] / 3 + (returns[from_b] - returns[from_b].mean()) * 2 / 3
    np.testing.assert_allclose(depth_1[at_c][from_b], wanted)
