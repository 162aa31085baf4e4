# `make demo` and `make test` need git, make, Python 3.11 or newer and pip; they install into .venv. khot itself runs on
# Python 3.10, for which some of the versions in constraints.txt do not exist.
#   make demo PYTHON=python3.12       choose the Python that .venv is made with
#   make demo TORCH_INDEX=URL         take torch from another index, such as PyTorch's one of builds for a CPU only
#   make test PIP_FLAGS='--index-url URL'    add flags to `pip install`
PIP_FLAGS ?=
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.khot-ready
UNFINISHED := $(VENV)/.khot-unfinished

.DEFAULT_GOAL := help
.PHONY: help demo experiments test durations test-all test-oldest test-middle test-newest matrix check lint docs wheel bench findings gpu clean

help:  ## prints this list
	@echo "The first target that needs Python makes .venv, and downloads torch and some 300 MB more into it."
	@echo "Times are for two idle cores, downloads not included."
	@echo
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(READY)  ## learns which ten pixels of a digit to look at; table and figure go to demo-output/; two minutes
	$(BIN)/python experiments/feature_selection.py --out demo-output

# With DATA=mnist DATA_DIR=folder, only the experiments that support this data set run, on it. That takes days on two
# cores. Finished runs are kept in experiments/results/mnist/runs, and the same command continues from there, also with
# more seeds. To start again, delete that folder.
DATA ?=
DATA_DIR ?=
SCRIPTS := $(filter-out %/build_readme.py,$(shell grep -l '^if __name__' experiments/*.py))
EXPERIMENTS = $(if $(DATA),$(shell grep -l 'experiment_parser.*"$(DATA)"' $(SCRIPTS)),$(SCRIPTS))
RESULTS = experiments/results$(if $(DATA),/$(DATA))

experiments: $(READY)  ## repeats the papers' comparisons and rebuilds experiments/README.md; an hour
	@for script in $(EXPERIMENTS); do \
		set -- --out $(RESULTS) $(if $(DATA),--data $(DATA) --data-dir "$(DATA_DIR)"); \
		if test "$(DATA)" && grep -q run_grid $$script; then set -- "$$@" --runs "$(RESULTS)/runs"; fi; \
		echo "$$script" && $(BIN)/python $$script "$$@" || exit 1; \
	done
	$(BIN)/python experiments/build_readme.py

PROGRESS = --progress -o console_output_style=classic
test: $(READY)  ## runs the tests that need no accelerator, except those marked exhaustive; ten minutes
	$(BIN)/python -m pytest -n auto --dist worksteal --most $(PROGRESS)

test-all: $(READY)  ## runs every test that needs no accelerator; half an hour
	$(BIN)/python -m pytest -n auto --dist worksteal --all $(PROGRESS)

durations: $(READY)  ## like test, and writes the seconds of each file to tests/durations.csv
	$(BIN)/python -m pytest -n auto --dist worksteal --most --durations-file tests/durations.csv

check: $(READY)  ## runs some cases of the quick tests; two minutes
	$(BIN)/python -m pytest -n auto --dist worksteal $(PROGRESS)

test-oldest: $(READY)  ## like test-all, on the oldest versions of Python, torch and the others that khot supports
	$(BIN)/tox -e oldest

test-middle: $(READY)  ## like test-all, on versions between these and the newest
	$(BIN)/tox -e middle

test-newest: $(READY)  ## like test-all, on the newest versions
	$(BIN)/tox -e newest

matrix: $(READY)  ## test-oldest, test-middle, then test-newest
	$(BIN)/tox

lint: $(READY)  ## runs ruff and mypy; a minute
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

SPHINX = $(BIN)/python -m sphinx --fail-on-warning --quiet --doctree-dir docs/_build/doctrees
docs: $(READY)  ## builds the site in docs/_build/html, and runs its examples, in six minutes; then its doctests
	$(SPHINX) -b html docs docs/_build/html
	$(SPHINX) -b doctest docs docs/_build/doctest
	$(BIN)/python docs/check_links.py docs/_build/html
	$(BIN)/python docs/check_api.py docs/_build/html

# Uses two environments: one builds the packages, the other has only the wheel and its dependencies.
wheel:  ## builds and checks the packages in dist/, and tries the wheel in an empty environment
	@$(find_python); set -ex; rm -rf dist build/builder build/empty; \
	"$$python" -m venv build/builder; "$$python" -m venv build/empty; \
	build/builder/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS) -c constraints.txt build twine; \
	export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 1577836800); \
	build/builder/bin/python -m build; \
	build/builder/bin/python -m twine check --strict dist/*; \
	$(call install_torch,build/empty/bin/python) \
	build/empty/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS) -c constraints.txt dist/*.whl; \
	(cd build/empty && bin/python -I ../../tests/wheel_smoke.py); \
	rm -rf build/builder build/empty

bench: $(READY)  ## measures times of khot and of other implementations
	@for script in $(filter-out %/timing.py %/sass.py %/gpu.py %/gpu_static.py %/gpu_tiles.py,$(wildcard benchmarks/*.py)); do echo "$$script" && $(BIN)/python "$$script" || exit 1; done

findings:  ## shows what other packages really do, in environments of their own, and which behaviour has changed
	@for script in findings/*.sh; do \
		if found=$$("$$script" 2>&1); then echo "as before: $$script: $$(echo "$$found" | tail -n 1)"; \
		else echo "changed: $$script"; echo "$$found" | tail -n 3; changed=yes; fi; \
	done; test -z "$$changed"

# Uses a Python whose torch supports the accelerator, unchanged: no .venv, no pinned versions, Pyro only if installed.
GPU_TESTS := $(filter-out %_aot.py %_interpreter.py,$(wildcard tests/kernels/test_triton*.py)) \
	$(wildcard tests/*/test_accelerator.py)
gpu:  ## runs tests and benchmarks on an accelerator, in the Python given by PYTHON (default python3)
	@export PYTHONPATH=src:.; python="$(or $(PYTHON),python3)"; \
	"$$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ echo "make gpu: torch finds no accelerator here, nothing run"; exit 0; }; \
	files="$(GPU_TESTS)"; "$$python" -c 'import pyro' 2>/dev/null || \
		{ echo "make gpu: without Pyro, no tests of designs"; files="$(filter-out tests/distributions/%,$(GPU_TESTS))"; }; \
	"$$python" -m pytest -m gpu -rs --each-file-runs $$files && "$$python" benchmarks/gpu.py

clean:  ## removes .venv and everything made by the other targets
	rm -rf $(VENV) demo-output build dist docs/_build docs/api docs/examples docs/tutorials docs/experiments.md .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	find src tests examples experiments benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Sets $$python to PYTHON or, without that, to the first Python that runs and is new enough.
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
define find_python
for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	"$$python" $(NEW_ENOUGH) 2>/dev/null && break; \
	python=; \
done; \
if [ -z "$$python" ]; then \
	python=$(or $(firstword $(PYTHON)),python3); \
	version=$$("$$python" -c 'import sys; print("Python %d.%d.%d" % sys.version_info[:3])' 2>/dev/null); \
	echo "The development environment needs Python 3.11 or newer, though khot itself runs on 3.10;" \
		"$$python is $${version:-not found, or does not run}."; \
	echo "Run: make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3.11"; \
	exit 1; \
fi >&2
endef

# Installs torch from TORCH_INDEX, if that is given; everything else then comes from the usual index.
install_torch = $(if $(TORCH_INDEX),$(1) -m pip install --disable-pip-version-check -c constraints.txt \
	--index-url $(TORCH_INDEX) torch;,)

# An existing .venv is updated; one whose making was interrupted is made anew.
$(READY): pyproject.toml constraints.txt
	@if [ ! -e $(VENV) ] || [ -e $(UNFINISHED) ]; then \
		$(find_python); \
		echo "making $(VENV) with $$python"; \
		rm -rf $(VENV) && mkdir $(VENV) && touch $(UNFINISHED) && "$$python" -m venv $(VENV) || exit 1; \
	elif ! $(BIN)/python $(NEW_ENOUGH); then \
		echo "The development environment needs Python 3.11 or newer; $(BIN)/python is older. Run: rm -r $(VENV)" >&2; \
		exit 1; \
	fi
	@echo "Downloads what constraints.txt names, unless pip has it: torch and some 300 MB. torch for a CPU only is 200 MB,"
	@echo "then .venv has 2.4 GB; on Linux its default brings several GB for CUDA. TORCH_INDEX=... chooses: see pytorch.org."
	@$(call install_torch,$(BIN)/python)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@rm -f $(UNFINISHED) && touch $@
