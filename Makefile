# Every target runs from .venv, which is made here with the versions of constraints.txt.
# Needed beforehand: Python 3.11 or later (PYTHON=python3.12 picks one), and make.

PYTHON ?= python3
# Passed on: make verify DEVICE=cuda ARGS="--loss supcon", make test ARGS="-k bad_input"
DEVICE ?=
ARGS ?=
REPORT ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
VENV_STAMP := $(VENV)/.installed
PEERS_STAMP := .peers/.installed
ALL_PEERS_STAMP := .peers/.installed-all
# The oldest triton that the kernels are held to; constraints.txt has the newest.
OLD_TRITON := 3.6.0
OLD_TRITON_STAMP := .peers/.installed-triton-$(OLD_TRITON)
OLD_TRITON_FOLDER := .peers/triton-3.6
export PAIRPROOF_PEERS := $(CURDIR)/.peers
# The tests start many processes, and each starts faster from bytecode that is on disk.
unexport PYTHONDONTWRITEBYTECODE
# What JAX compiled for one batch size is kept for the next run, and shared among processes.
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.peers/jax-cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv peers verify test test-all kernels kernels-covering kernels-3.6 kernels-long kernels-golden kernels-golden-slow kernels-golden-all mutants bench bench-quick lint format types fixtures fixtures-check peers-check wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

# The version is read from src/pairproof/__init__.py when the package is built.
$(VENV_STAMP): pyproject.toml constraints.txt src/pairproof/__init__.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pairproof needs Python 3.11 or later, not " + sys.version.split()[0] + ": make PYTHON=...")'
	@echo "venv: installing pairproof, its extras and the pinned versions of constraints.txt into $(VENV) (once; torch is large)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) setuptools wheel
	@$(INSTALL) --no-build-isolation --editable '.[verify,pml,bench,safetensors,triton,mutants,dev]'
	@touch $@

# A package of which one file is used: it is loaded by path, so what it depends on stays out.
$(PEERS_STAMP): constraints.txt | $(VENV_STAMP)
	@echo "peers: installing the original SupCon code (one file of bioencoder) into .peers/bioencoder"
	@rm -rf .peers/bioencoder
	@$(INSTALL) --no-deps --target .peers/bioencoder bioencoder
	@touch $@

# Small packages go into the venv, of large ones the files alone go beside it.
$(ALL_PEERS_STAMP): pyproject.toml constraints.txt | $(VENV_STAMP) $(PEERS_STAMP)
	@echo "peers: installing info-nce-pytorch, infonce and optax on JAX into $(VENV), setfit, open_clip and lightly into .peers"
	@$(INSTALL) --no-build-isolation --editable '.[peers]'
	@for package in setfit open_clip_torch lightly; do \
		rm -rf .peers/$$package && $(INSTALL) --no-deps --target .peers/$$package $$package || exit 1; \
	done
	@touch $@

# Beside the one in the venv, and put before it where it is wanted.
$(OLD_TRITON_STAMP): | $(VENV_STAMP)
	@echo "triton: installing triton $(OLD_TRITON) into $(OLD_TRITON_FOLDER)"
	@rm -rf $(OLD_TRITON_FOLDER)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(OLD_TRITON_FOLDER) triton==$(OLD_TRITON)
	@touch $@

venv: $(VENV_STAMP) $(PEERS_STAMP) ## make .venv and .peers, or bring them up to date
	@echo "venv: $(VENV) is up to date"

peers: $(VENV_STAMP) $(PEERS_STAMP) $(ALL_PEERS_STAMP) ## install every peer that can be; without, they are skipped
	@echo "peers: every peer is installed"

verify: $(VENV_STAMP) $(PEERS_STAMP) ## judge every printed figure and every implementation (DEVICE=cuda, ARGS=...)
	@echo "verify: every implementation against every case, pytorch-metric-learning and the original SupCon code included"
	@$(BIN)/pairproof verify --require pml,supcontrast $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

# One worker per core, each with one thread. A worker starts with consecutive tests, which share what they compute.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test: $(VENV_STAMP) $(PEERS_STAMP) ## run the tests except the slow ones (ARGS=... goes to pytest)
	@echo "test: pytest on tests/ without tests/kernels and without slow tests; three minutes on two cores"
	@$(PYTEST) --ignore=tests/kernels $(ARGS) tests

test-all: $(VENV_STAMP) $(PEERS_STAMP) ## run the tests, the slow ones too
	@echo "test-all: pytest on tests/ without tests/kernels; eight minutes on two cores"
	@$(PYTEST) --ignore=tests/kernels -m "" $(ARGS) tests

kernels: $(VENV_STAMP) ## compile every GPU kernel in every form and check what came out; needs no GPU (ARGS=--help)
	@echo "kernels: compiled for sm_80, sm_90 and sm_100; four to five minutes on two cores"
	@$(BIN)/python tools/compile_kernels.py $(ARGS)

kernels-covering: $(VENV_STAMP) ## the same for a choice: every form once, every kernel for every architecture and length
	@echo "kernels-covering: compiled for sm_80, sm_90 and sm_100; a minute and a half on two cores"
	@$(BIN)/python tools/compile_kernels.py --covering $(ARGS)

kernels-3.6: $(VENV_STAMP) $(OLD_TRITON_STAMP) ## the same with triton 3.6
	@echo "kernels-3.6: the same with triton $(OLD_TRITON)"
	@PYTHONPATH=$(OLD_TRITON_FOLDER) $(BIN)/python tools/compile_kernels.py $(ARGS)

kernels-long: $(VENV_STAMP) ## the same for sm_89, more lengths of rows and more types of arguments too
	@echo "kernels-long: every architecture and length that has tiles of its own"
	@$(BIN)/python tools/compile_kernels.py --long $(ARGS)

# Whether kernels are interpreted or compiled is decided when triton is imported: a run of its own.
KERNEL_TESTS := TRITON_INTERPRET=1 $(PYTEST)

kernels-golden: $(VENV_STAMP) ## run the GPU kernels on golden cases in triton's interpreter; needs no GPU
	@echo "kernels-golden: pytest on tests/kernels without slow tests, in triton's interpreter; two minutes on two cores"
	@$(KERNEL_TESTS) $(ARGS) tests/kernels

kernels-golden-slow: $(VENV_STAMP) ## the same with the slow tests
	@echo "kernels-golden-slow: pytest on tests/kernels, in triton's interpreter; four minutes on two cores"
	@$(KERNEL_TESTS) -m "" $(ARGS) tests/kernels

kernels-golden-all: $(VENV_STAMP) ## the same with the slow tests, on all golden cases
	@echo "kernels-golden-all: pytest on tests/kernels with every golden case, in triton's interpreter"
	@$(KERNEL_TESTS) -m "" --all-cases $(ARGS) tests/kernels

mutants: $(VENV_STAMP) ## make 660 mistakes in reference/ and fast/ and count those that the cases find (ARGS=--help)
	@echo "mutants: 660 mutants, two at a time, judged by the conformance cases"
	@OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py --processes 2 $(ARGS)

bench: $(VENV_STAMP) $(PEERS_STAMP) ## time everything into bench/results/, on a quiet machine (DEVICE=cuda, ARGS=--help)
	@echo "bench: ours beside every peer, in a fresh process for every size, allocator and loss; about 25 minutes"
	@$(BIN)/python -m bench $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

bench-quick: $(VENV_STAMP) $(PEERS_STAMP) ## the same at N = 256 and 1024 alone; writes nothing (ARGS="--floors 0.5")
	@echo "bench-quick: ours beside every peer at N = 256 and 1024; under two minutes"
	@$(BIN)/python -m bench --quick $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

lint: $(VENV_STAMP) ## check style and layout; changes nothing
	@echo "lint: ruff check, ruff format --check"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV_STAMP) ## rewrite the layout of the code
	@echo "format: ruff check --fix, ruff format"
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

# mypy needs one folder that looks like the installed package.
types: $(VENV_STAMP) ## check the types of our code, strictly
	@echo "types: mypy --strict on pairproof, tools/ and bench/"
	@rm -rf .links && mkdir -p .links/pairproof
	@for room in conformance fast fixtures reference; do ln -s "../../$$room" ".links/pairproof/$$room"; done
	@for file in __init__.py py.typed; do ln -s "../../src/pairproof/$$file" ".links/pairproof/$$file"; done
	@$(BIN)/mypy --package pairproof
	@$(BIN)/mypy tools
	@$(BIN)/mypy bench

fixtures: $(VENV_STAMP) $(PEERS_STAMP) $(ALL_PEERS_STAMP) ## rebuild fixtures/; on a clean tree this changes nothing (ARGS=--peer=...)
	@echo "fixtures: proving, counting and summing everything under fixtures/ anew"
	@OMP_NUM_THREADS=1 $(BIN)/pairproof fixtures rebuild $(ARGS)

fixtures-check: $(VENV_STAMP) $(PEERS_STAMP) $(ALL_PEERS_STAMP) ## say what make fixtures would change (REPORT=... is verify's --json)
	@echo "fixtures-check: the same in a copy, compared with fixtures/$(if $(REPORT),; the counts are those of $(REPORT))"
	@OMP_NUM_THREADS=1 $(BIN)/$(if $(REPORT),python tools/check_fixtures.py $(REPORT),pairproof fixtures check $(ARGS))

peers-check: $(VENV_STAMP) $(PEERS_STAMP) $(ALL_PEERS_STAMP) ## check that the table of peers is up to date (REPORT=... as above)
	@echo "peers-check: conformance/implementations/README.md"
	@$(BIN)/python tools/peer_table.py --check $(if $(REPORT),--report $(REPORT))

# What a former build left behind would be packed again, deleted modules included.
wheel: $(VENV_STAMP) ## build the wheel from the source distribution and check what it holds
	@echo "wheel: building dist/, then checking that the wheel holds all of ours and nothing else"
	@rm -rf build dist *.egg-info
	@$(BIN)/python -m build --quiet --no-isolation --outdir dist .
	@$(BIN)/python tools/check_wheel.py dist/*.whl

clean: ## remove everything that make made
	rm -rf $(VENV) .peers .links build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find bench conformance fast fixtures reference src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
