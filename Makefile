# The two commands of the README: `make serve` and `make test`. Both set up first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

# Empty counts as unset. With it set, every process would compile the modules that it imports, which takes a worker as
# much CPU time as the rest of its start; setup leaves them uncompiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup serve lint test test-e2e test-long test-long-others test-long-e2e test-router test-installed test-cpus test-triton-3.6 mutants format browser

setup: $(STAMP)

NATIVE := $(wildcard gllm/kernels/native/*.cpp gllm/kernels/native/*.h)

# --no-compile: pip would compile every file of every package, of which few are ever imported.
$(STAMP): requirements.txt requirements-sim.txt requirements-plan.txt requirements-otel.txt requirements-ray.txt requirements-dev.txt setup.py $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gllm needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile torch==2.13.0
	$(BIN)/pip install -q --no-compile -r requirements.txt -r requirements-sim.txt -r requirements-plan.txt -r requirements-otel.txt -r requirements-ray.txt -r requirements-dev.txt
	$(BIN)/pip install -q --no-deps -e .
	touch $(STAMP)

serve: $(STAMP)
	$(BIN)/python -m gllm.serve demo $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# COVERAGE=1 prints the coverage of the tests outside tests/e2e and holds it to its floor; tracing makes Python code two
# to three times as slow.
COVERAGE ?=
test: lint
	$(BIN)/python -m pytest -q -rs -n auto --maxprocesses 8 --dist worksteal --ignore tests/e2e $(if $(COVERAGE),--cov --cov-report=term:skip-covered)
	$(MAKE) test-e2e

# Tests in tests/e2e start servers, three at a time, as they wait for half of their time. tests/e2e/conftest.py has the
# order of their files: the longest one first.
E2E := $(BIN)/python -m pytest -q -rs -n 3 --dist loadscope --no-loadscope-reorder tests/e2e
test-e2e: $(STAMP)
	$(E2E)

# The tests of servers over HTTP with a router and two engines as the server. What they leave out looks at a pipeline's
# own processes and profiles.
ROUTER_TESTS := tests/clients/test_demo_server.py $(addprefix tests/e2e/test_,chat.py control.py doors.py operations.py sampling.py serving.py structured.py tools.py)
test-router: $(STAMP)
	GLLM_TEST_FLEET=2 $(BIN)/python -m pytest -q -rs -n 2 --dist loadscope $(ROUTER_TESTS) \
		-k "not bubbles and not idle_pipeline and not leave_nothing and not profile and not server_info and not top_and_json and not compiling_process and not kept_connections"

# Soaks, full sizes, many seeds: the tests marked `long`, and the property tests with their long profile. Tests of servers
# run as in test-e2e, also after a failure of the others. ARGS: further options of pytest for both.
LONG := --timeout 1800 $(ARGS)
test-long:
	$(MAKE) --keep-going test-long-others test-long-e2e

test-long-others: $(STAMP)
	$(BIN)/python -m pytest -q -rs -n auto --maxprocesses 8 --dist worksteal --ignore tests/e2e --hypothesis-profile long -m "long or hypothesis" $(LONG)

test-long-e2e: $(STAMP)
	$(E2E) -m long $(LONG)

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

# Takes long: docs/mutants.md. MINUTES limits it; a later run goes on where one was cut off.
MINUTES ?= 25
mutants: $(STAMP)
	-timeout $(MINUTES)m $(BIN)/mutmut run
	$(BIN)/mutmut results

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
