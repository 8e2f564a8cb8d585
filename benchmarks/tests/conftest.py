"""What the tests of the benchmarks see of the machine."""

from devices import hide_gpus


def pytest_configure(config):
    hide_gpus(config)
