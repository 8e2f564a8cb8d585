"""What the tests of the benchmarks see of the machine, and how they run a program."""

import sys

import pytest
from devices import hide_gpus


def pytest_configure(config):
    hide_gpus(config)


@pytest.fixture(scope="session")
def games(tmp_path_factory):
    """A folder of generated games, which are made once."""
    return tmp_path_factory.mktemp("games")


@pytest.fixture
def run_main(monkeypatch):
    """Run a program in this process: its imports take longer than all that it does here."""

    def run(module, *words):
        monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, words)])
        module.main()

    return run
