# Every target uses .venv, which is created with the versions of constraints.txt.
# Requirements: make, and Python 3.11 or later (PYTHON=python3.12 selects one).

PYTHON ?= python3
# Options for a command: make verify DEVICE=cuda ARGS="--loss supcon", make test ARGS="-k bad_input"
DEVICE ?=
ARGS ?=
# A file written by pairproof verify --thorough --json, from which fixtures-check and peers-check take the counts.
REPORT ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
VENV_STAMP := $(VENV)/.installed
PEERS_STAMP := .peers/.installed
ALL_PEERS_STAMP := .peers/.installed-all
# The oldest supported triton; constraints.txt has the newest.
OLD_TRITON := 3.6.0
OLD_TRITON_STAMP := .peers/.installed-triton-$(OLD_TRITON)
OLD_TRITON_FOLDER := .peers/triton-3.6
export PAIRPROOF_PEERS := $(CURDIR)/.peers
# The tests start many processes, which start faster with bytecode on disk.
unexport PYTHONDONTWRITEBYTECODE
# Keep what JAX compiles for the next run, and share it among processes.
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.peers/jax-cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv peers verify report test test-all kernels kernels-covering kernels-3.6 kernels-long kernels-golden kernels-golden-slow kernels-golden-all machines mutants bench bench-quick lint format types fixtures fixtures-check fixtures-archive peers-check docs wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' Makefile

# The version is read from src/pairproof/__init__.py when the package is built.
$(VENV_STAMP): pyproject.toml constraints.txt src/pairproof/__init__.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pairproof needs Python 3.11 or later, not " + sys.version.split()[0] + ": make PYTHON=...")'
	@echo "venv: installing pairproof and its extras into $(VENV), with the versions of constraints.txt (once; two to three minutes; numba of the extra cpu takes 208 MB)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) setuptools wheel
	@for extras in verify cpu,pml,bench,examples safetensors,triton,mutants dev; do \
		echo "venv: pairproof[$$extras]"; \
		$(INSTALL) --no-build-isolation --editable ".[$$extras]" || exit 1; \
	done
	@touch $@

# Only one file of this package is used, and it is loaded by its path. Dependencies are not installed.
$(PEERS_STAMP): constraints.txt | $(VENV_STAMP)
	@echo "peers: installing the original SupCon code (one file of bioencoder) into .peers/bioencoder"
	@rm -rf .peers/bioencoder
	@$(INSTALL) --no-deps --target .peers/bioencoder bioencoder
	@touch $@

# Small packages are installed into .venv. Of large ones, single files are used, without dependencies.
$(ALL_PEERS_STAMP): pyproject.toml constraints.txt | $(VENV_STAMP) $(PEERS_STAMP)
	@echo "peers: installing the extra peers into $(VENV), and packages of which single files are used into .peers"
	@$(INSTALL) --no-build-isolation --editable '.[peers]'
	@for package in setfit open_clip_torch lightly sentence-transformers; do \
		rm -rf .peers/$$package && $(INSTALL) --no-deps --target .peers/$$package $$package || exit 1; \
	done
	@touch $@

# Installed beside the triton of .venv, and selected with PYTHONPATH.
$(OLD_TRITON_STAMP): | $(VENV_STAMP)
	@echo "triton: installing triton $(OLD_TRITON) into $(OLD_TRITON_FOLDER)"
	@rm -rf $(OLD_TRITON_FOLDER)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(OLD_TRITON_FOLDER) triton==$(OLD_TRITON)
	@touch $@

venv: $(VENV_STAMP) $(PEERS_STAMP) ## create or update .venv and .peers
	@echo "venv: $(VENV) is up to date"

peers: $(VENV_STAMP) $(PEERS_STAMP) $(ALL_PEERS_STAMP) ## install every peer (without this, verify skips some)
	@echo "peers: every peer is installed"

verify: $(VENV_STAMP) $(PEERS_STAMP) ## check every implementation and the numbers in documents (DEVICE=cuda)
	@echo "verify: every implementation on cases of up to 258 rows, in float64 and float32; on everything: ARGS=--thorough"
	@$(BIN)/pairproof verify --require pml,supcontrast $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

report: $(VENV_STAMP) $(PEERS_STAMP) ## verify, and write report/index.html
	@echo "report: every implementation on the cases of up to 258 rows, as one HTML page"
	@$(BIN)/pairproof report --out report $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

# One worker per core, each with one thread. A worker gets consecutive tests, which share cached results.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test: $(VENV_STAMP) $(PEERS_STAMP) ## run the tests, except slow ones (ARGS is for pytest)
	@echo "test: pytest on tests/ without tests/kernels and without slow tests; two to three minutes on two cores"
	@$(PYTEST) --ignore=tests/kernels $(ARGS) tests

# Two workers more than there are processors: many slow tests wait for other processes.
test-all: $(VENV_STAMP) $(PEERS_STAMP) ## run the tests, including slow ones
	@echo "test-all: pytest on tests/ without tests/kernels; half an hour to three quarters on two cores"
	@$(PYTEST) -n $$(($$(getconf _NPROCESSORS_ONLN) + 2)) --ignore=tests/kernels -m "" $(ARGS) tests

kernels: $(VENV_STAMP) ## compile every variant of the GPU kernels, without a GPU
	@echo "kernels: compiling for sm_80, sm_90 and sm_100; four to five minutes on two cores"
	@$(BIN)/python tools/compile_kernels.py $(ARGS)

kernels-covering: $(VENV_STAMP) ## compile a selection of the variants
	@echo "kernels-covering: compiling for sm_80, sm_90 and sm_100; a minute and a half on two cores"
	@$(BIN)/python tools/compile_kernels.py --covering $(ARGS)

kernels-3.6: $(VENV_STAMP) $(OLD_TRITON_STAMP) ## compile every variant with triton 3.6
	@echo "kernels-3.6: compiling with triton $(OLD_TRITON)"
	@PYTHONPATH=$(OLD_TRITON_FOLDER) $(BIN)/python tools/compile_kernels.py $(ARGS)

kernels-long: $(VENV_STAMP) ## compile for more architectures, embedding dimensions and types
	@echo "kernels-long: compiling for every architecture and every embedding dimension with its own tiles"
	@$(BIN)/python tools/compile_kernels.py --long $(ARGS)

# triton decides at its import whether to interpret or to compile kernels, so these tests need a separate run.
KERNEL_TESTS := TRITON_INTERPRET=1 $(PYTEST)

kernels-golden: $(VENV_STAMP) ## run the GPU kernels on golden cases, without a GPU
	@echo "kernels-golden: pytest on tests/kernels without slow tests, in triton's interpreter; a minute and a half on two cores"
	@$(KERNEL_TESTS) $(ARGS) tests/kernels

kernels-golden-slow: $(VENV_STAMP) ## the same, including slow tests
	@echo "kernels-golden-slow: pytest on tests/kernels, in triton's interpreter"
	@$(KERNEL_TESTS) -m "" $(ARGS) tests/kernels

kernels-golden-all: $(VENV_STAMP) ## the same on all golden cases
	@echo "kernels-golden-all: pytest on tests/kernels with every golden case, in triton's interpreter"
	@$(KERNEL_TESTS) -m "" --all-cases $(ARGS) tests/kernels

machines: $(VENV_STAMP) $(PEERS_STAMP) ## run verify on the code paths of other processors (ARGS="--covering")
	@echo "machines: pairproof verify with other code paths of MKL, ATen, OpenBLAS and glibc; make test with two of them"
	@$(BIN)/python tools/machines.py --tests --require pml,supcontrast $(ARGS)

mutants: $(VENV_STAMP) ## count how many of 320 mistakes the cases find
	@echo "mutants: running the cases on 320 mutants, two at a time; 35 minutes on two cores"
	@OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py --processes 2 $(ARGS)

bench: $(VENV_STAMP) $(PEERS_STAMP) $(ALL_PEERS_STAMP) ## measure time, memory and errors; write bench/results/
	@echo "bench: every form of every loss beside plain torch and the peers, N = 32 to 8192; up to an hour"
	@$(BIN)/python -m bench $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

bench-quick: $(VENV_STAMP) $(PEERS_STAMP) ## measure N = 64, 256 and 1024; writes no files
	@echo "bench-quick: every form of every loss beside plain torch, N = 64, 256 and 1024; less than three minutes"
	@$(BIN)/python -m bench --quick $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

lint: $(VENV_STAMP) ## check style and layout; changes nothing
	@echo "lint: ruff check, ruff format --check"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV_STAMP) ## rewrite the layout of the code
	@echo "format: ruff check --fix, ruff format"
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

# mypy needs one folder with the layout of the installed package.
types: $(VENV_STAMP) ## check the types with mypy
	@echo "types: mypy --strict on pairproof, tools/ and bench/"
	@rm -rf .links && mkdir -p .links/pairproof
	@for folder in compat conformance fast fixtures reference; do ln -s "../../$$folder" ".links/pairproof/$$folder"; done
	@for file in __init__.py py.typed; do ln -s "../../src/pairproof/$$file" ".links/pairproof/$$file"; done
	@$(BIN)/mypy --package pairproof
	@$(BIN)/mypy tools
	@$(BIN)/mypy bench

fixtures: $(VENV_STAMP) $(PEERS_STAMP) $(ALL_PEERS_STAMP) ## recompute fixtures/; on a clean tree nothing changes
	@echo "fixtures: recomputing the proofs, counts and checksums of fixtures/"
	@OMP_NUM_THREADS=1 $(BIN)/pairproof fixtures rebuild $(ARGS)

fixtures-check: $(VENV_STAMP) $(PEERS_STAMP) $(ALL_PEERS_STAMP) ## report what make fixtures would change (REPORT=FILE)
	@echo "fixtures-check: recomputing in a copy and comparing with fixtures/$(if $(REPORT),; the counts are those of $(REPORT))"
	@OMP_NUM_THREADS=1 $(BIN)/$(if $(REPORT),python tools/check_fixtures.py $(REPORT),pairproof fixtures check $(ARGS))

# The archive can be checked without Python: see readers/.
fixtures-archive: $(VENV_STAMP) ## pack the fixtures into dist/ (ARGS="--previous FILE")
	@echo "fixtures-archive: packing fixtures/ and readers/ into dist/"
	@$(BIN)/python tools/fixtures_archive.py $(ARGS)

peers-check: $(VENV_STAMP) $(PEERS_STAMP) $(ALL_PEERS_STAMP) ## check that the table of peers is current (REPORT=FILE)
	@echo "peers-check: conformance/implementations/README.md"
	@$(BIN)/python tools/peer_table.py --check $(if $(REPORT),--report $(REPORT))

docs: $(VENV_STAMP) ## build the documentation into build/docs/html
	@echo "docs: installing Sphinx (once), then building build/docs/html; a warning is an error"
	@$(INSTALL) --no-build-isolation --editable '.[docs]'
	@$(BIN)/python tools/build_docs.py

# Files of an earlier build, such as deleted modules, would be packed again.
wheel: $(VENV_STAMP) ## build the wheel and check which files it contains
	@echo "wheel: building into dist/, then checking that the wheel contains every file of the package and nothing else"
	@rm -rf build dist *.egg-info
	@$(BIN)/python -m build --quiet --no-isolation --outdir dist .
	@$(BIN)/python tools/check_wheel.py dist/*.whl

clean: ## remove everything that make has created
	rm -rf $(VENV) .peers .links build dist report *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find bench compat conformance fast fixtures reference src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
