# `make demo` and `make test` set up everything they need in .venv; they need Python 3.11 or later, as
# `python3` or as `make PYTHON=…`, and a package index.
PYTHON ?= python3
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Tests compile thousands of small programs, and run them for milliseconds: the compiler is asked to be quick
# rather than thorough, by flags that it knows. `make test TEST_XLA_FLAGS=` tests what it makes by default.
quick := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
  --xla_cpu_parallel_codegen_split_count=1
TEST_XLA_FLAGS ?= $$($(bin)/python tests/known_flags.py $(quick))

bin := .venv/bin
run_pages := tests/test_docs.py::test_the_examples_of_a_page_run_in_order

# Tests that need data sets look here; without the folder they are skipped.
data := $(abspath ../shared/data)
ifneq ($(wildcard $(data)),)
export BILEVAX_DATA ?= $(data)
endif

.PHONY: demo gallery notebooks test test-oldest fuzz faults lint format wheel bench docs docs-test clean

demo: .venv/experiments
	$(bin)/python -m bilevax.experiments.demo

# The pictures of the gallery, drawn anew: about twenty minutes. `make gallery GALLERY=grouped` draws one.
GALLERY ?= $(patsubst examples/%.py,%,$(wildcard examples/*.py))

gallery: .venv/dev
	mkdir -p docs/gallery
	for name in $(GALLERY); do \
	  echo $$name; $(bin)/python examples/$$name.py --picture docs/gallery/$$name.png || exit 1; done

notebooks: .venv/dev
	$(bin)/python -m scripts.notebooks build/notebooks

test: .venv/dev
	XLA_FLAGS="$$(echo $$XLA_FLAGS $(TEST_XLA_FLAGS))" $(bin)/python -m pytest $(PYTEST_ARGS)

# The same tests with the oldest versions that pyproject.toml admits, in an environment of their own.
test-oldest: bin := .venv-oldest/bin
test-oldest: .venv-oldest/dev
	XLA_FLAGS="$$(echo $$XLA_FLAGS $(TEST_XLA_FLAGS))" $(bin)/python -m pytest $(PYTEST_ARGS)

# Inputs for each of the 16 parsers of bilevax.data: 112,000 in all.
FUZZ_INPUTS ?= 7000

fuzz: .venv/dev
	$(bin)/python tests/fuzz/parsers.py $(FUZZ_INPUTS)

# Faults injected into runs: killed processes, damaged files, full disks, errors in callbacks and more.
FAULTS ?= 1000

faults: .venv/dev
	cd tests && ../$(bin)/python -m faults --count $(FAULTS)

# Besides style and types: what takes seconds to check in the pages and the plan of the folders.
lint: .venv/dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/python -m pytest tests/test_house.py tests/test_docs.py tests/test_site.py --deselect $(run_pages)
	$(bin)/pyright --pythonpath $(bin)/python

format: .venv/dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

# Builds the wheel, compares its files with those in git, installs it without extras in a clean environment,
# and runs the README's quick start there.
wheel: bin := build/wheel/venv/bin
wheel:
	$(check_python)
	rm -rf build/wheel
	$(PYTHON) -m venv build/wheel/venv
	$(bin)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(bin)/python scripts/compare_wheel.py build/wheel/*.whl
	$(bin)/python -m pip install --quiet --disable-pip-version-check build/wheel/*.whl
	$(bin)/python -I scripts/try_wheel.py

# At most an hour, and what became slower since another commit; `make bench BENCH="step growth"` runs some
# parts. JSON and Markdown go to results/bench/, named after the commit.
BENCH ?=

bench: .venv/dev
	$(bin)/python -m benchmarks.suite $(if $(BENCH),--parts $(BENCH))

# The site, in build/site. Every warning is an error, and a public name without a place in the reference is one.
docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/docs
	$(bin)/python -m mkdocs build --quiet
	@echo "build/site/index.html is the first page"

# Opens the site in Chromium (Debian's package of that name), wide and narrow. Screenshots: build/screenshots.
docs-test: docs .venv/docs-test
	$(bin)/python -m scripts.docs_site.browse

clean:
	rm -rf .venv .venv-oldest build dist results .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define check_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "bilevax needs Python 3.11 or later; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
endef

# A stamp per set of extras: installed again when pyproject.toml changes.
.venv/%: pyproject.toml | .venv/bin/python
	$(bin)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	touch $@

.venv/bin/python:
	$(check_python)
	$(PYTHON) -m venv .venv

.venv-oldest/dev: pyproject.toml scripts/oldest.txt
	$(check_python)
	rm -rf .venv-oldest
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint scripts/oldest.txt --editable ".[dev]"
	touch $@

