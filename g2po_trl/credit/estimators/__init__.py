"""Estimators: pure functions from a state graph to one advantage a step."""
