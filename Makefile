# `make check` is what CI runs; `make` lists all targets.
PYTHON ?= .venv/bin/python
BASE ?= python3
TORCH ?= 2.13.0
BENCH ?= --quick
AUDITED ?= $(or $(TMPDIR),/tmp)/plateaux-audited.txt
EXTRAS ?= all,dev
VENVS ?= $(or $(TMPDIR),/tmp)/plateaux-venvs
UNIT = core optim ensembles config methods models data evaluation prediction loss_landscape training storage
MORE ?=
WORKERS ?= 3  # on two cores: many tests wait for processes they started or killed
IMPORTS = $(PYTHON) -c "from importlinter.cli import lint_imports_command as run; run()"

# More threads than cores make torch many times slower, and PYTHONDONTWRITEBYTECODE doubles the time of every import.
export OMP_NUM_THREADS = 1
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup check check-faults nightly check-gpu check-oldest check-newest format lint test pages docs bench audit organization release

help:  ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F '|' '{printf "  make %-13s %s\n", $$1, $$2}'

setup:  ## make .venv with a pinned torch and every tool (BASE=python3.11, TORCH_INDEX=URL of an index with CPU wheels)
	$(BASE) -m venv .venv
	echo "torch==$(TORCH)" > .venv/constraints.txt
	.venv/bin/python -m pip install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)" torchvision) "torch==$(TORCH)"
	.venv/bin/python -m pip install hatchling
	PIP_CONSTRAINT="$(CURDIR)/.venv/constraints.txt" .venv/bin/python -m pip install --no-build-isolation -e ".[$(EXTRAS)]"
	.venv/bin/python -m pip install --no-deps --no-build-isolation -e papers

check: lint  ## lint, and all tests of the library but those of check-faults and nightly
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup -m "not nightly" --ignore tests/attacks --ignore tests/integration

check-faults:  ## runs that are killed, and hostile files and inputs
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup tests/attacks tests/integration/test_kill.py

nightly: lint docs  ## everything: all laws, Ray, S3, the gallery, coverage, attacks on the service, mutants, the papers
	@echo "lines marked cuda-only, left out of coverage: $$(grep -rhF '# cuda-only' --include='*.py' src | wc -l | tr -d ' ')"
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup --cov --cov-config=pyproject.toml --cov-report=term
	PLATEAUX_LONG=1 $(PYTHON) -m pytest tests/attacks/test_service.py --timeout 0
	$(PYTHON) tests/mutation/run.py
	$(PYTHON) -m pytest -c papers/pyproject.toml --rootdir papers -n $(WORKERS) papers/tests

format:  ## rewrite the sources in the one format
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:  ## format, lint, types, layers, security and workflows, without the tests
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(IMPORTS)
	$(PYTHON) -m mypy --config-file papers/pyproject.toml papers/src
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as run; run(['--config', 'papers/pyproject.toml'])"
	$(PYTHON) -m bandit -q -c pyproject.toml -r src
	$(dir $(PYTHON))zizmor --offline --quiet .github
	$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PYTHON) -m pre_commit validate-config

test:  ## the unit tests that are fast and start no process (MORE=tests/deploy adds to them)
	$(PYTHON) -m pytest -n 2 --dist loadgroup -m "not slow and not process and not nightly" $(addprefix tests/,$(UNIT)) $(MORE)

# With a CPU build of torch and a CUDA build of torchvision, timm cannot be imported without its operators.
pages bench: export PYTHONPATH := tests/torchvision_operators$(if $(PYTHONPATH),:$(PYTHONPATH))
pages:  ## write the generated pages and pictures of the documentation again
	$(PYTHON) docs/make_recipe_page.py
	$(PYTHON) docs/make_cli_page.py
	$(PYTHON) docs/make_architecture_picture.py
	$(PYTHON) docs/make_sharpbalance_picture.py

docs:  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

bench:  ## run every benchmark, print JSON, append ratios to benchmarks/history.jsonl and compare (BENCH= runs the full forms)
	@$(PYTHON) benchmarks/_history.py $(BENCH)

check-gpu:  ## run the CUDA tests and the overhead benchmark on a GPU, and print what to report
	$(PYTHON) .ci/check_gpu.py

check-oldest:  ## the fast tests with the oldest supported torch, in a venv of its own (VENVS=folder, BASE=python3.12)
	BASE=$(BASE) .ci/check_torch "torch==2.8.*" $(VENVS)/oldest

check-newest:  ## the fast tests with the newest torch, in a venv of its own
	BASE=$(BASE) .ci/check_torch "torch>=2.8,<3" $(VENVS)/newest

audit:  ## look up known vulnerabilities of all dependencies; fails if no database can be reached
	@$(PYTHON) -c "import pip_audit" 2> /dev/null || { echo "pip-audit is missing: pip install -e '.[release]'"; exit 1; }
	$(PYTHON) .ci/dependencies.py > $(AUDITED) && $(PYTHON) -m pip_audit --strict --no-deps --disable-pip -r $(AUDITED)

organization:  ## write the GitHub organization into every file that names it (NAME=acme)
	$(PYTHON) .ci/organization.py $(NAME)

release:  ## check version and tree, build and check wheel and sdist, write SBOM and checksums to dist/; uploads nothing
	$(PYTHON) .ci/release.py $(RELEASE)
