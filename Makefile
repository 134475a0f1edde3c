# Tidemill. Two commands are all that a fresh Debian or Ubuntu machine with a Rust toolchain needs:
#
#   make up      build, and run a cluster on this machine until Ctrl-C   (make up ARGS="--model DIR --prefill 2")
#   make build   every program, the bench too
#   make test    every test but those that need other tools (make test-all): Rust, then the official OpenAI client and a browser against real clusters
#   make real    a fixed set of requests to a trained model of yours   (make real MODEL=model.gguf)
#   make real-tools   clients, frameworks, benchmarks and agents as users install them, each against a cluster   (make real-tools MODEL=model.gguf)
#   make sim-faults    a simulated cluster under faults, by seeds   (make sim-faults SEEDS=10000)
#   make fuzz    kernels at random shapes: the same bits on every instruction set, in any cut   (make fuzz CASES=100000)
#   make fuzz-inputs   everything that comes from outside, made odd: no panic, no hang, no memory without bound   (make fuzz-inputs MINUTES=60)
#
#   make package   a Debian package and a tarball of all programs, units and examples, in target/package
#   make image     a container image of that, with buildah
#
#   make test-aarch64    the CPU backend's tests for aarch64, in qemu
#   make test-isa        the CPU backend's tests on an x86-64 processor without AVX, in qemu
#   make test-rdma       RDMA on real verbs, in a QEMU guest with the kernel's software devices   (make test-rdma PARTS="rails pool")

TARGET := $(or $(CARGO_TARGET_DIR),target)
VENV   ?= .venv

.PHONY: up programs build test setup-kafka test-aarch64 test-isa test-rdma check check-cores check-aarch64 check-dependencies fuzz fuzz-inputs setup-build setup-check setup-test

up: programs
	$(TARGET)/release/tidemill up $(ARGS)

# What `tidemill up` runs, and no more: the bench is half a minute by itself.
PROGRAMS = -p tidemill-deploy -p tidemill-coordinator -p tidemill-prefill -p tidemill-decode -p tidemill-kvpool
programs: setup-build
	@test -x $(TARGET)/release/tidemill || echo "Building Tidemill: ten to thirty minutes on two cores the first time, seconds after that." >&2
	cargo build --release --locked $(PROGRAMS) $(FEATURES)

# The same tree in both: programs, systemd units, example configurations, alerts, dashboards, manifests. Programs of packages also have what
# `make up` does without: RocksDB, thirteen minutes of C++ by itself, and the check `schema` of `tidemill eval`. `make package FEATURES=` does
# without, too.
.PHONY: package image setup-rocksdb
package: FEATURES ?= --features tidemill-kvpool/rocksdb,tidemill-eval/schema
package: setup-rocksdb programs
	deploy/make-package $(TARGET)/release $(TARGET)/package

# BASE names another base image, such as one of a registry of yours.
BASE ?= docker.io/library/debian:12-slim
image: package
	@deploy/apt-install buildah:buildah
	cp $(TARGET)/package/tidemill_*.deb deploy/container/tidemill.deb
	buildah build --build-arg BASE=$(BASE) --tag localhost/tidemill:latest deploy/container
	rm deploy/container/tidemill.deb

build: setup-build
	cargo build --release --locked --workspace

# Each phase says its time, and the thirty slowest tests are listed. `make test CHANGED=--changed` leaves out what has passed (`tests/run`).
# The CUDA kernels are compiled with NVRTC, which needs no GPU. Some tests start programs of other packages, which Cargo does not build for
# them. Python's tests run on all cores and one more, a file at a time: they mostly wait.
PHASE = .ci/phase
PYTHON_TESTS = $(shell expr $$(nproc) + 1)
test: setup-test
	$(PHASE) "compile programs" cargo build --release --locked $(PROGRAMS) -p tidemill-bench --features tidemill-eval/schema
	LD_LIBRARY_PATH=$$(echo $(abspath $(VENV))/lib/python3*/site-packages/nvidia/cu13/lib)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH} \
	PATH=$(abspath $(TARGET))/tools/bin:$$PATH tests/run $(CHANGED); rust=$$?; \
	tests/slowest 30 target/nextest/default; exit $$rust
	TIDEMILL_BIN=$(abspath $(TARGET)/release/tidemill) \
	$(PHASE) "tests in Python" $(VENV)/bin/python -m pytest -q -n $(PYTHON_TESTS) --dist loadfile --durations 10 tests/python
	$(PHASE) "types of the console" npm --prefix tests/console run --silent types
	TIDEMILL_BIN=$(abspath $(TARGET)/release/tidemill) TIDEMILL_BENCH=$(abspath $(TARGET)/release/tidemill-bench) \
	$(PHASE) "the console in a browser" npm --prefix tests/console run --silent test

# Every test and lint that there is, also those for which CI needs other tools.
.PHONY: test-all test-kafka test-rocksdb
test-all: check test
	.ci/test-sync
	TIDEMILL_ALL=1 .ci/features

# What operators switch on when they build: events to Kafka, which links OpenSSL, and RocksDB, which is thirteen minutes of C++.
test-kafka: setup-build setup-kafka
	cargo nextest run --cargo-profile dev --locked -p tidemill-tenancy --features kafka -- kafka
	cargo check --locked -p tidemill-coordinator --features kafka

test-rocksdb: setup-build setup-rocksdb
	cargo nextest run --cargo-profile dev --locked -p tidemill-kvpool --lib --features rocksdb -- records

# A trained model as its users would use it: chat, tools, structured output, twenty turns, summaries, the judge, golden cases. It prints a
# page of figures, and fails where the server, not the model, does.   (make real MODEL=qwen.gguf PARTS="chat tools")
.PHONY: real
real: programs
	python3 bench/real.py $(TARGET)/release/tidemill "$(MODEL)" $(PARTS)

# Some 16 GB of packages, once, in target/real-tools; the network is needed for these only.   (make real-tools MODEL=qwen.gguf TOOLS="codex aider")
.PHONY: real-tools
real-tools: programs
	tests/real-tools/run --program $(TARGET)/release/tidemill $(if $(MODEL),--model "$(MODEL)") $(TOOLS)

# What `make test` does for a few dozen shapes, for as many as one has the time for. Failures are kept, shrunk, and tried first next time.
CASES ?= 5000
fuzz:
	PROPTEST_CASES=$(CASES) cargo test --release --locked -p tidemill-kernels --lib shapes

# What `make test` does for a few hundred cases of each target, on all cores for as long as one has the time for. What is found is printed
# with the arguments that replay it: `make fuzz-inputs ARGS="--target frames --seed 5"`, which also prints the inputs.
MINUTES ?= 10
fuzz-inputs: setup-build
	cargo build --release --locked -p tidemill-fuzz
	$(TARGET)/release/tidemill-fuzz --minutes $(MINUTES) $(ARGS)

# What `make test` does for a few hundred seeds, for as many as one has the time for: 10,000 take about five minutes of one core. A seed
# that breaks a rule prints the command that replays it with a trace.
SEEDS ?= 10000
.PHONY: sim-faults sim-mutations
sim-faults:
	cargo run --release --locked -p tidemill-sim --example faults -- --seeds $(SEEDS)

# Which seed finds each of the bugs that can be planted: what `sim/src/faults/mutation.rs` stores for the tests.
sim-mutations:
	cargo run --release --locked -p tidemill-sim --example faults -- --mutations

# Writes what `docs/reference` has from the code; `make test` compares.
.PHONY: reference
reference: setup-build
	TIDEMILL_RENEW_REFERENCE=1 cargo test --release --locked -p tidemill-deploy --test rules reference

# Format, lints and documentation, without warnings.
check: setup-build check-cores check-aarch64 check-dependencies
	cargo fmt --all --check
	$(PHASE) "lints" cargo clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(PHASE) "documentation" cargo doc --locked --workspace --no-deps --quiet

# The deciding part of each role builds without its shell: no tokio, no QUIC, no logging. All are built at once. That proves it for each,
# since none has a feature switched on, by its own manifest or by another's.
CORES = proto grammar cluster registry safety tenancy eval gateway kvpool engine prefill decode sim
CORE_PACKAGES = --no-default-features $(CORES:%=-p tidemill-%)
check-cores:
	$(PHASE) "cores" cargo check --locked --quiet $(CORE_PACKAGES)
	@if cargo tree --locked $(CORE_PACKAGES) -e normal --prefix none -f '{lib} {f}' | grep -E '^(tokio|quinn|tracing) |^tidemill_[a-z]+ [a-z]'; then \
		echo "the cores must not depend on that, nor have that feature"; exit 1; \
	fi

# The packages that are linked, and where they come from, as `deny.toml` allows it. Its list covers every platform, so those that only a
# foreign one builds are fetched here as well; after that it reads what lies on disk, and nothing else.
DENY = $(TARGET)/tools/bin/cargo-deny
check-dependencies: setup-check
	cargo fetch --quiet --locked
	$(DENY) --locked --offline --log-level error check licenses sources bans

# Where `make test-aarch64` has installed what that takes.
check-aarch64:
	@if ls "$$(rustc --print sysroot)/lib/rustlib/aarch64-unknown-linux-gnu/lib" >/dev/null 2>&1 && command -v aarch64-linux-gnu-gcc >/dev/null; then \
		cargo clippy --locked --target aarch64-unknown-linux-gnu -p tidemill-kernels -p tidemill-model -- -D warnings; \
	else \
		echo "aarch64 is not checked: \`make test-aarch64\` installs what that takes"; \
	fi

test-aarch64: setup-build
	@deploy/apt-install aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc:libc6-dev-arm64-cross qemu-aarch64-static:qemu-user-static
	rustup target add aarch64-unknown-linux-gnu
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu" \
	cargo test --release --locked --target aarch64-unknown-linux-gnu -p tidemill-kernels -p tidemill-model --lib --test checkpoints

# What `make test` has built, on a processor of 2008: no instruction beyond the compiler's base target may be executed unasked. Qemu knows
# AVX2, which any machine has anyway, but neither AVX-512 nor AMX.
test-isa: setup-build
	@deploy/apt-install qemu-x86_64-static:qemu-user-static
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="qemu-x86_64-static -cpu Nehalem" \
	cargo test --release --locked -p tidemill-kernels -p tidemill-model --lib --test checkpoints -- $(ARGS)

# No RDMA hardware is needed, nor any module on this machine. A machine that others keep busy makes it slow, and its deadlines pass.
# The feature `rdma-abi` takes libclang and the headers of what it compares with; nothing else does.
PARTS ?= abi rails pool cluster
test-rdma: programs
	@deploy/apt-install qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio depmod:kmod ip:iproute2 xz:xz-utils zstd:zstd ib_write_bw:perftest
	@ls /etc/libibverbs.d/rxe.driver >/dev/null 2>&1 || deploy/apt-install :ibverbs-providers
	@ls /usr/include/infiniband/verbs.h /usr/include/rdma/rdma_cma.h /usr/lib/llvm-*/lib/libclang*.so* >/dev/null 2>&1 || \
		deploy/apt-install :libibverbs-dev :librdmacm-dev :libclang-dev :pkg-config
	kvpool/rdma-guest/test $(PARTS)

# BLAKE3's SIMD, aws-lc and mimalloc are C and assembly. protoc makes the types of raft's messages.
setup-build:
	@deploy/apt-install cc:gcc cc:libc6-dev as:binutils protoc:protobuf-compiler

# Beside what is built here, so that it stays until that goes. A machine's own runner of tests is as good.
DENY_VERSION = 0.20.2
NEXTEST_VERSION = 0.9.143
setup-check:
	@$(DENY) --version 2>/dev/null | grep -qF ' $(DENY_VERSION)' || \
		cargo install --quiet --locked cargo-deny --version $(DENY_VERSION) --no-default-features --root $(TARGET)/tools --target-dir $(TARGET)/tools/build

setup-kafka:
	@deploy/apt-install :libssl-dev pkg-config:pkg-config c++:g++

setup-rocksdb:
	@deploy/apt-install c++:g++
	@ls /usr/lib/llvm-*/lib/libclang*.so* >/dev/null 2>&1 || deploy/apt-install :libclang-dev

setup-test:
	@deploy/apt-install python3:python3 chromium:chromium node:nodejs npm:npm pg_createcluster:postgresql redis-server:redis-server promtool:prometheus
	@test -x $(VENV)/bin/python || python3 -m venv $(VENV) 2>/dev/null || { deploy/apt-install :python3-venv && python3 -m venv --clear $(VENV); }
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/python/requirements.txt -r kernels/tests/requirements.txt
	@npm --prefix tests/console ci --silent --no-audit --no-fund
	@cargo nextest --version >/dev/null 2>&1 || $(TARGET)/tools/bin/cargo-nextest --version >/dev/null 2>&1 || \
		$(PHASE) "build the runner of tests" cargo install --quiet --locked cargo-nextest --version $(NEXTEST_VERSION) --no-default-features \
		--features default-no-update --root $(TARGET)/tools --target-dir $(TARGET)/tools/build
