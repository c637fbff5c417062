# All tasks for developers and CI. `make` alone lists them.
# Nothing in this file sets RUSTFLAGS, a profile or features: torch-sys compiles C++ for minutes, and
# any such difference between two targets would compile it again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# setup must be done before anything else starts; cargo is parallel by itself.
.NOTPARALLEL:

# Where cargo puts programs: `CARGO_TARGET_DIR=/fast/disk make run` works.
BIN := $(or $(CARGO_TARGET_DIR),target)/debug

# Builds only the programs. Tests use the same programs and dependencies: scripts/check-features.py.
BUILD := cargo build --workspace --bins
TESTS := --workspace --lib --bins --tests

RECIPE := recipes/digits_cpu.toml
RANKS := 2
HISTORIES := 2000000
RUNS := 1000000

.PHONY: help
help: ## list the targets
	@echo "Baton: distributed training that survives losing its machine. Targets:"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

.PHONY: setup
setup: ## install compilers and libtorch where missing
	@scripts/setup.sh

.PHONY: tools
tools: ## setup, and the linters and the test runner into .tools/
	@scripts/setup.sh --tools

.PHONY: build
build: setup ## compile baton, baton-coordinator and baton-worker
	$(BUILD)

.PHONY: run
run: build ## train on handwritten digits, no GPU needed; ARGS="--no-auto-resume" adds flags
	$(BIN)/baton up $(RECIPE) --ranks $(RANKS) $(ARGS)

.PHONY: run-lora
run-lora: build ## fine-tune a small language model, no GPU needed; downloads 93 MB
	scripts/lora/run.sh $(ARGS)

# Doc tests run first, so that the test runner's count and the skipped tests are printed last. The
# programs are built beforehand because whole-process tests start them from $(BIN). No test uses an example.
.PHONY: test
test: tools ## every test; ARGS="some_name" selects by name
	$(if $(ARGS),,$(MAKE) --no-print-directory test-python)
	$(BUILD)
	$(if $(ARGS),,cargo test --workspace --doc)
	if [ -x .tools/bin/cargo-nextest ]; \
	then .tools/bin/cargo-nextest nextest run $(TESTS) $(ARGS); \
		scripts/check-skips.py $(dir $(BIN))nextest/default/junit.xml; \
	else cargo test $(TESTS) $(ARGS); \
		echo "without cargo-nextest, skipped tests are not counted"; \
	fi

# `make parity` runs the others, with PyTorch and Baton's programs.
.PHONY: test-python
test-python: tools ## the tests of the Python package that need no PyTorch
	cd python && PYTHONPATH=../.tools/python \
		python3 -m pytest --quiet --ignore tests/with_torch $(ARGS)

# The two named ones, in the gate, need no PyTorch.
.PHONY: notebooks
notebooks: build ## execute the notebooks on the CPU; all need PyTorch, ARGS="signals p4d" do not
	scripts/notebooks/run.sh $(ARGS)

# Cheap checks first. See deny.toml for why cargo-deny checks no advisories.
.PHONY: lint
lint: tools ## formatting, clippy, docs, licences, scripts, links, words; writes nothing
	cargo metadata --locked --format-version 1 >/dev/null  # Cargo.lock is up to date
	cargo fmt --all --check
	scripts/check-shell.sh
	if [ -x .tools/bin/ruff ]; \
	then .tools/bin/ruff check --quiet && .tools/bin/ruff format --quiet --check; \
	else echo "without ruff, Python is not checked"; \
	fi
	python3 scripts/check-links.py
	scripts/check-features.py
	scripts/check-words.py
	scripts/check-layers.sh
	.tools/bin/cargo-deny --log-level error check bans licenses sources
	CUSTOM_LIBFUZZER_PATH=/nowhere/libFuzzer.a \
		cargo clippy --workspace --all-targets --features baton-fuzz/libfuzzer -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

.PHONY: fix
fix: tools ## format, apply clippy's automatic fixes, and generate the tables of docs/recipes.md
	cargo clippy --workspace --all-targets --fix --allow-dirty --allow-staged
	cargo fmt --all
	.tools/bin/ruff check --quiet --fix; .tools/bin/ruff format --quiet
	BATON_WRITE=1 cargo test --quiet --workspace --test reference

.PHONY: audit
audit: tools ## known vulnerabilities and yanked crates among the dependencies; needs GitHub and crates.io
	.tools/bin/cargo-deny --log-level error check advisories

.PHONY: outdated
outdated: ## dependencies with a newer version; needs crates.io
	cargo update --dry-run --verbose

.PHONY: sim
sim: ## the cluster simulation at length, half an hour; HISTORIES=2000000
	BATON_SIM_HISTORIES=$(HISTORIES) cargo test --workspace --test simulation

.PHONY: sim-scale
sim-scale: ## 1,024 spot machines for a week, simulated in minutes; SCALE="nodes=128 meet=5 seed=2"
	BATON_SCALE="$(SCALE)" cargo test --package baton-job --test scale fleet_trains -- --nocapture

# Not part of test and lint: a million inputs take minutes.
.PHONY: fuzz
fuzz: setup ## damaged files, JPEGs and checkpoints at length; RUNS=1000000, TARGET="jpeg shard"
	RUNS=$(RUNS) TARGET="$(TARGET)" scripts/fuzz.sh $(ARGS)

# Not part of test and lint: a thousand runs of the tests.
.PHONY: mutants
mutants: ## mutation check of the core: each small change must fail a test; ARGS="baton-job --share 0/8" for a part
	scripts/mutants.py $(ARGS)

.PHONY: parity
parity: build ## compare with PyTorch and ffcv on this machine
	scripts/parity/run.sh $(ARGS)

.PHONY: bench-loader
bench-loader: build ## compare the data loader with the real ffcv; ARGS="--rounds 2" for a quick run
	scripts/bench-loader/run.sh $(ARGS)

.PHONY: chaos
chaos: build ## fault injection: 500 kills during saves, 5,000 histories of ranks, 200 faults of real processes, then `proof`; hours
	BATON_TEST_KILLS=500 cargo test --package baton-checkpoint --test suite kills -- --nocapture
	BATON_CHAOS_SEEDS=5000 cargo test --package baton-trainer --test suite chaos -- --nocapture --include-ignored
	BATON_CHAOS_FAULTS=100 cargo test --package baton-tests --test chaos -- --nocapture
	$(MAKE) proof

FAULTS ?= 1000
.PHONY: proof
proof: build ## 1,000 faults of all kinds on three hosts (FAULTS=200: fewer); BATON_CHAOS_HISTORY="...": these
	BATON_CHAOS_FAULTS=$(FAULTS) cargo test --package baton-tests --test proof -- --nocapture

.PHONY: bench-checkpoint
bench-checkpoint: build ## compare checkpoints with torch.distributed.checkpoint; ARGS="--rounds 1" for a quick run
	scripts/bench-checkpoint/run.sh $(ARGS)

.PHONY: wheel
wheel: setup ## the Python package with the programs, in dist/; ARGS="--in bullseye" for machines with an older glibc
	scripts/dist/wheel.sh $(ARGS)

.PHONY: dist
dist: setup ## a tarball, a package for Debian and Ubuntu, and an SBOM, in dist/; ARGS as for wheel
	scripts/dist/packages.sh $(ARGS)

.PHONY: wheel-check
wheel-check: ## install the wheel of dist/ in a new environment, and train there; ARGS="--in jammy" in Ubuntu 22.04
	scripts/dist/check.sh $(ARGS)

.PHONY: wheel-test
wheel-test: build tools ## the end-to-end tests with the programs of the wheel in dist/; ARGS="some_name" selects by name
	scripts/dist/test.sh $(ARGS)

.PHONY: bench-lora
bench-lora: build ## LoRA steps, memory and recovery, compared with PEFT; downloads 93 MB once
	scripts/bench-lora/run.sh $(ARGS)

.PHONY: bench-recovery
bench-recovery: build ## recovery from kills, compared with torchrun; ARGS="--rounds 1 --goodput-seconds 60" for a quick run
	scripts/bench-recovery/run.sh $(ARGS)

.PHONY: bench-control
bench-control: build ## 10,000 simulated workers and the coordinator on one core, compared with torchft's lighthouse; ARGS="--rounds 1" for a quick run
	cargo build --workspace --example swarm --example bucket
	scripts/bench-control/run.sh $(ARGS)

.PHONY: deploy-check
deploy-check: build tools ## check deploy/ without a cloud: AWS emulated, machines booted, systemd, Slurm, Kubernetes, image, runbook; CHECKS="systemd slurm" selects
	scripts/deploy/setup.sh
	scripts/deploy/check.sh $(BIN) $(CHECKS)

.PHONY: dashboard-check
dashboard-check: build ## the web dashboard, and a notebook, in a headless Chromium; needs node 20, npm and chromium
	scripts/check-dashboard.sh

.PHONY: profile-check
profile-check: build ## read profiles of a job with Perfetto's trace processor, and measure what recording costs; needs node
	scripts/profile/check.sh

.PHONY: bench-step
bench-step: build ## compare a training step with PyTorch DDP on the CPU; ARGS="--rounds 2" for a quick run
	scripts/bench-step/run.sh $(ARGS)

# A GPU machine needs neither Rust nor this build: it gets a stripped worker and PyTorch's libraries.
.PHONY: gpu-programs
gpu-programs: build ## stripped programs for a GPU machine without Rust: target/gpu/; copy them there with scripts/gpu/
	mkdir -p target/gpu
	for program in baton baton-coordinator baton-worker; do strip -o target/gpu/$$program $(BIN)/$$program; done

.PHONY: gpu-check
gpu-check: gpu-programs ## check CUDA, NCCL and libtorch on this machine's GPUs
	scripts/gpu/check.sh target/gpu/baton-worker

.PHONY: gpu-bench
gpu-bench: gpu-programs ## compare a training step on this machine's GPU with PyTorch; ARGS="--language" LoRA with PEFT, "--rounds 1" a quick run
	scripts/gpu/bench.sh target/gpu/baton-worker $(ARGS)

.PHONY: gpu-first-hour
gpu-first-hour: gpu-programs ## measure first what matters most on this machine's GPU, a part at a time; ARGS="check job" names parts
	scripts/gpu/first-hour.sh target/gpu target/gpu/results $(ARGS)

.PHONY: compat-run
compat-run: build ## add a run of this version to tests/compat, for compatibility tests of later versions; NAME=0.2.0
	scripts/compat-run.sh $(BIN) $(or $(NAME),$(shell git describe --always --dirty))

.PHONY: clean
clean: ## remove build outputs; libtorch and tools are kept (to remove them: rm -rf .libtorch .tools)
	cargo clean
