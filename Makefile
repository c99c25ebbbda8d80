# The two commands of the README: `make serve` and `make test`. Each sets up what it needs first.
PYTHON ?= python3
BIN := .venv/bin
SERVE_STAMP := .venv/.serves
STAMP := .venv/.ready

# Empty counts as unset. With it set, every process would compile the modules that it imports, which takes a worker as
# much CPU time as the rest of its start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup serve lint check test test-all test-long coverage experiments test-router test-installed test-cpus test-triton-3.6 format browser

setup: $(STAMP)

NATIVE := $(wildcard gllm/kernels/native/*.cpp gllm/kernels/native/*.h)
# --no-compile: pip would compile every file of every package, of which few are ever imported. Those that a server imports
# are compiled below: its first start would take twice as long.
INSTALL := $(BIN)/pip install -q --no-compile

# What serving needs. GLLM_BUILDS: compile only the kernels that this processor can run.
$(SERVE_STAMP): requirements.txt setup.py $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gllm needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	$(INSTALL) -r requirements.txt
	GLLM_BUILDS=usable $(INSTALL) --no-deps -e .
	$(BIN)/python -m compileall -q -j 0 gllm
	$(BIN)/python -c 'import torch'
	touch $@

# What the checks, the simulator, the planners and the optional parts need besides.
EXTRAS := $(addprefix requirements-,$(addsuffix .txt,sim plan otel ray dev))
$(STAMP): $(SERVE_STAMP) $(EXTRAS)
	$(INSTALL) $(addprefix -r ,$(EXTRAS))
	touch $@

serve: $(SERVE_STAMP)
	$(BIN)/python -m gllm.serve demo $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Lint, types and tests of parts of the project while working on them: make check FILES="gllm/scheduler tests/sim/test_link.py"
check: $(STAMP)
	$(BIN)/python -m scripts.check $(FILES)

PYTEST := $(BIN)/python -m pytest -q -rs
# Tests outside tests/e2e use one core each. Those in tests/e2e start servers, three at a time, as they wait for half of
# their time; tests that share a server run on one worker.
UNIT := $(PYTEST) -n auto --maxprocesses 8 --dist worksteal --ignore tests/e2e
E2E := $(PYTEST) -n 3 --dist loadgroup --no-loadscope-reorder tests/e2e

test: lint
	$(UNIT) -m "not full and not long"
	$(E2E) -m "not full and not long"

# Everything else but what runs for hours; also the package as users install it, and the oldest supported Triton.
test-all: $(STAMP)
	$(UNIT) -m "full and not long"
	$(E2E) -m "full and not long"
	$(MAKE) test-installed test-triton-3.6

# Soaks, full products of parameters, many seeds: the tests marked `long`, and the property tests with their long profile.
# ARGS: further options of pytest. Tests of servers run also after a failure of the others.
LONG := --timeout 1800 $(ARGS)
test-long: $(STAMP)
	$(UNIT) --hypothesis-profile long -m "long or hypothesis" $(LONG); status=$$?; $(E2E) -m long $(LONG) && exit $$status

# Lines and branches that the tests outside tests/e2e reach, held to a floor. Tracing makes Python code two to three times
# as slow.
coverage: $(STAMP)
	$(UNIT) -m "not long" --cov --cov-report=term:skip-covered

# All pages of experiments/pages again, by the commands that they name; ARGS: "--lane simulation", or names of pages. Pages on
# emulated devices need a machine with nothing else to do.
experiments: $(STAMP)
	$(BIN)/python -m experiments.remake $(ARGS)

# The tests of servers over HTTP with a router and two engines as the server. What they leave out looks at a pipeline's
# own processes and profiles.
ROUTER_TESTS := tests/clients/test_demo_server.py $(addprefix tests/e2e/test_,chat.py control.py doors.py operations.py sampling.py serving.py structured.py tools.py)
test-router: $(STAMP)
	GLLM_TEST_FLEET=2 $(BIN)/python -m pytest -q -rs -n 2 --dist loadscope $(ROUTER_TESTS) \
		-k "not bubbles and not idle_pipeline and not leave_nothing and not profile and not server_info and not top_and_json and not compiling_process and not kept_connections"

# PyTorch 2.11, the oldest supported on GPUs, requires this Triton: the kernels must compile with it too.
OLD_TRITON := 3.6.0
OLD_TRITON_STAMP := .venv/triton-$(OLD_TRITON)/.ready

$(OLD_TRITON_STAMP): $(STAMP)
	$(BIN)/pip install -q --no-deps --target $(@D) triton==$(OLD_TRITON)
	touch $@

test-triton-3.6: $(OLD_TRITON_STAMP)
	PYTHONPATH=$(dir $<) $(BIN)/python -m gllm.kernels.aot --triton $(OLD_TRITON) --arch 80 90

# Build the wheel, install it outside the checkout and serve from there.
test-installed: $(STAMP)
	$(BIN)/python -m scripts.check_installation

# The suite as on older CPUs: one run for each kernel build that this CPU supports. Takes long.
test-cpus: $(STAMP)
	$(BIN)/python -m scripts.test_cpus $(ARGS)

# The chat page is tested in a headless Chromium; without one those tests are skipped.
CHROMIUM := $(firstword $(shell command -v chromium chromium-browser google-chrome google-chrome-stable))
SUDO := $(if $(filter 0,$(shell id -u)),,sudo -n)
APT := $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::http::Timeout=20

browser:
ifeq ($(CHROMIUM),)
	$(APT) update -q
	$(APT) install -qy --no-install-recommends chromium fonts-liberation
else
	@echo "there is a browser: $(CHROMIUM)"
endif

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
