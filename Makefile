# Tidemill. Two commands are all that a fresh Debian or Ubuntu machine with a Rust toolchain needs:
#
#   make up      build, and run a cluster on this machine until Ctrl-C   (make up ARGS="--model DIR --prefill 2")
#   make test    every test: Rust, then the official OpenAI client against a real cluster

TARGET := $(or $(CARGO_TARGET_DIR),target)
VENV   ?= .venv

.PHONY: up build test check setup-build setup-test

up: build
	$(TARGET)/release/tidemill up $(ARGS)

build: setup-build
	cargo build --release --locked --workspace

# The CUDA kernels are compiled with NVRTC, which needs no GPU.
test: setup-build setup-test
	LD_LIBRARY_PATH=$$(echo $(abspath $(VENV))/lib/python3*/site-packages/nvidia/cu13/lib)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH} \
	cargo test --release --locked --workspace
	TIDEMILL_BIN=$(abspath $(TARGET)/release/tidemill) $(VENV)/bin/python -m pytest -q tests/python

# Format, lints and documentation, without warnings.
check: setup-build
	cargo fmt --all --check
	cargo clippy --release --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --workspace --no-deps --quiet

# C compiler: BLAKE3's and ring's SIMD are C and assembly. C++ and Clang: RocksDB, and the bindings to it.
setup-build:
	@deploy/apt-install cc:gcc as:binutils c++:g++ clang:clang clang:libclang-dev

setup-test:
	@deploy/apt-install python3:python3
	@test -x $(VENV)/bin/python || python3 -m venv $(VENV) 2>/dev/null || { deploy/apt-install :python3-venv && python3 -m venv --clear $(VENV); }
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/python/requirements.txt -r kernels/tests/requirements.txt
