# Two commands for users: `make demo` and `make test`. CI and pre-commit run targets of this file.

PYTHON ?= python3
BIN := .venv/bin
# What the native module is made of; Python files need no build.
SOURCES := $(shell find src ucx-sys -type f) $(wildcard tests/rust/traced.rs Cargo.* build.rs setup.py pyproject.toml build_support/*)
CARGO := environment="$$($(BIN)/python build_support/toolchain.py environment)" && \
	eval "$$environment" && cargo

.PHONY: help demo build wheel test test-python test-matrix test-wheels test-aarch64 table test-quick test-rust test-libraries fuzz lint lint-rust lint-python format bench bench-quick docs clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: build ## the shallow-water model on 2 ranks: film, picture and speed, in demo/
	@mkdir -p demo
	$(BIN)/python tools/mpirun.py -n 2 examples/shallow_water.py \
	    --save-figure demo/shallow_water.png --save-animation demo/shallow_water.gif

build: .venv/built ## .venv with mpi4jax installed, and an MPI if the machine has none

wheel: .venv/tools ## one wheel for every MPI, in dist/; TARGET=aarch64-apple-darwin for that system
	$(BIN)/python tools/make_wheel.py dist $(TARGET)

test: .venv/tools ## lint, docs, Rust, and Python on 1 to 4 ranks with the MPI and JAX of .venv
	$(MAKE) --jobs=2 --output-sync test-python lint docs test-rust

test-matrix: .venv/tools ## the wheel with old and new JAX, Open MPI, MPICH and Intel MPI; clippy for macOS
	$(BIN)/python tools/make_wheel.py --lint aarch64-apple-darwin
	$(BIN)/python tools/matrix.py matrix

test-wheels: .venv/tools ## that wheel in new environments, one per MPI, without a compiler
	$(BIN)/python tools/matrix.py wheels

test-aarch64: .venv/tools ## the self-test and some tests on emulated aarch64, where that can be
	$(BIN)/python tools/aarch64.py

table: .venv/tools ## the table of transformations in docs/autodiff.md, from a run of every op under every transformation
	$(BIN)/python tools/transformations.py

# With a plus, make shows what it prints at once.
test-python: .venv/tools ## those Python tests
	+$(BIN)/python tools/matrix.py here

test-quick: .venv/tools ## the Python tests on 2 ranks in .venv
	$(BIN)/python tools/run_tests.py -n 2 tests/ranks

# Slightly optimised: some tests go through every bit pattern. Without what debuggers need, which
# takes longer to make than the rest. Under mpiexec for its time limit. Waiting ranks yield their cores, and
# do not sleep as those of the Python tests: the suite sends many small messages, each of which would wait for a sleep.
test-rust test-libraries: export CARGO_PROFILE_DEV_OPT_LEVEL = 1
test-rust test-libraries: export CARGO_PROFILE_DEV_DEBUG = 0
test-rust: RUN = $(CARGO) test --no-default-features --features stand-ins --config \
	"target.'cfg(all())'.runner='$(CURDIR)/$(BIN)/python $(CURDIR)/tools/mpirun.py --time-limit 900 -n $$ranks'"
test-rust: .venv/tools
	ranks=1; $(RUN) --workspace
	stand_ins="$$(PYTHONPATH=tools $(BIN)/python tests/gpu/libraries.py target/stand-ins)" && \
	    eval "$$stand_ins" && export MPI4JAX_TEST_CUDA_ON_CPU=reached && \
	    for ranks in 1 2 3 4; do $(RUN) --quiet --test mpi || exit 1; done

# With the variables that name their files; `make test-matrix` installs them.
test-libraries: .venv/tools
	$(CARGO) test --no-default-features --test libraries -- --ignored

# The second target needs a nightly compiler, and `cargo install cargo-fuzz`.
fuzz: .venv/tools ## random checkpoints; XLA's call frames under libFuzzer and an address sanitizer, for 25 seconds
	CHECKPOINTS=20000 CHECKPOINTS_SEED=$$(date +%s) $(BIN)/python tools/run_tests.py -n 1 \
	    tests/ranks/test_hostile_checkpoints.py -k random
	$(CARGO) +nightly fuzz run --fuzz-dir tests/fuzz frame --target-dir target/fuzz -- -max_total_time=25 -max_len=400

lint: lint-rust lint-python ## formatting, clippy, ruff, mypy, pyright, stubtest, schemas

# With what the release has compiled of other crates.
lint-rust: .venv/tools
	cargo fmt --check
	$(CARGO) clippy --release --all-targets --features stand-ins -- -D warnings

lint-python: .venv/tools
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/stubtest mpi4jax._native
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

format: .venv/tools ## what `make lint` only checks
	cargo fmt
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: .venv/tools ## speed against raw MPI, mpi4py, mpi4jax 0.9.1 and gloo: docs/measurements.md
	$(BIN)/python benches/suite/run.py
	$(BIN)/python benches/suite/third_party.py

bench-quick: .venv/tools ## seven ratios in two minutes, compared with those of benches/suite/quick.json
	$(BIN)/python benches/suite/quick.py

docs: .venv/tools ## HTML in docs/_build/html
	$(BIN)/sphinx-build -W docs docs/_build/html
	$(BIN)/python docs/check_pages.py

clean: ## everything that make has made
	rm -rf .venv .cache build demo dist docs/_build target python/*.egg-info
	rm -f python/mpi4jax/_native*.so

# Any pip will do to start with, and no ensurepip is needed, which some systems package apart.
$(BIN)/pip:
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python $(BIN)/python install --quiet pip

# Without build isolation, so that a later build finds the same MPI where cargo has seen it.
.venv/built: $(BIN)/pip $(SOURCES)
	requirements="$$($(BIN)/python build_support/toolchain.py requirements)" && \
	$(BIN)/pip install --quiet $$requirements
	@echo "Building the Rust core: 1 to 4 minutes on two idle cores"
	$(BIN)/pip install --verbose --no-deps --no-build-isolation --editable .
	$(BIN)/pip install --quiet --no-build-isolation --editable '.[examples]'
	@touch $@

.venv/tools: .venv/built
	$(BIN)/pip install --quiet --no-build-isolation --editable '.[dev]'
	@touch $@
