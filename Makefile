# Each target sets up what it needs in .venv: Python, a C compiler and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=

.PHONY: help install train test lint format clean

help:
	@echo "make train [ARGS=\"--config recipes/alfworld/qwen2.5-1.5b.yaml\"]   train an agent on ALFWorld"
	@echo "make test [ARGS=\"-k graph\"]                                      run the tests"
	@echo "make lint | format | install | clean"

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once; this takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[alfworld,plots,dev]"
	@touch $@

install: $(INSTALLED)

train: $(INSTALLED)
	$(BIN)/accelerate launch recipes/train_alfworld.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest tests $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
