# The one entry point; CI calls these targets. `make help` lists them.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin

help:
	@awk -F ':.*## ' '/^##@ /{printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## /{printf "  %-19s %s\n", $$1, $$2}' \
		$(MAKEFILE_LIST)

##@ Try it

setup: ## Create or update .venv: vLLM on CPU, LMCache, this package, tools
	@$(PYTHON) scripts/bootstrap.py

demo: setup ## vLLM and LMCache on CPU with this connector: a conversation, timed
	@$(BIN)/lmcache-xpu demo

clean: ## Remove .venv, caches and what the demo left
	rm -rf .venv build dist .demo .matrix .contract .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache site

##@ Run it with Docker

up: ## Start the Compose stack on an Intel GPU (settings: .env)
	@docker/up xpu

up-cpu: ## The same on CPU
	@docker/up cpu

logs: ## Follow the stack's logs
	@docker/compose --profile '*' logs -f --tail 100

down: ## Stop the stack; its volumes stay
	@docker/compose --profile '*' down

##@ Measure

loadtest: setup ## Load on a running server: HOST=http://... [WEB=1] [ARGS=...]
	@$(BIN)/locust -f loadtests/locustfile.py --host $(or $(HOST),$(error HOST=http://... is missing)) \
		--only-summary $(if $(WEB),--web-host 127.0.0.1,--headless) $(ARGS)

loadtest-compare: setup ## Engines without and with offload, same load: [PROFILE=long] [ARGS=...]
	@$(BIN)/python -m loadtests.compare --profile $(or $(PROFILE),long) $(ARGS)

capacity: setup ## How many users fit, without and with offload: [ARGS=...]
	@$(BIN)/python -m loadtests.capacity $(ARGS)

bench: setup ## The connectors and the demo's engine on CPU; needs a quiet machine
	@$(BIN)/python measurements/cpu_connectors.py
	@$(BIN)/python measurements/cpu_engine.py

##@ Test

# Parts that `make test` leaves out, or has with others; `lmcache` is LMCACHE=... beside this vLLM.
PART_tools := -m "tools and not matrix"
PART_models := $(addprefix tests/engine/test_,local.py groups.py models.py server.py) \
	$(addprefix tests/engine/test_,server_soak.py waiting.py) tests/helm/test_chart_side_car_engine.py
PART_ranks := $(addprefix tests/engine/test_,ends.py server_ranks.py resets.py engines_of_one_serve.py)
PART_loadtests := tests/loadtests -m alone
PART_bases := -s tests/test_install.py tests/engine/test_packages.py tests/containers/test_bases.py
PARTS := $(sort lmcache $(subst PART_,,$(filter PART_%,$(.VARIABLES))))
LMCACHE_DIR = $(CURDIR)/build/lmcache-$(or $(LMCACHE),$(error LMCACHE=... is missing))

test: setup ## Unit tests, and real engines: [PART=...], see CONTRIBUTING.md
ifeq ($(PART),)
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not (alone or matrix or tools)"
	@$(BIN)/pytest tests/engine -m "alone and not (matrix or tools)"
else ifeq ($(PART),lmcache)
	@$(BIN)/uv pip install --quiet --no-deps --target $(LMCACHE_DIR) lmcache==$(LMCACHE)
	@PYTHONPATH=$(LMCACHE_DIR) $(BIN)/pytest -m engine tests/engine tests/test_stored_by.py $(ARGS)
	@PYTHONPATH=$(LMCACHE_DIR) $(BIN)/pytest tests/tiers/disk -k l2_adapter
else
	@$(if $(filter bases,$(PART)),VLLM=$(or $(VLLM),0.29.0)) $(BIN)/pytest $(or $(PART_$(PART)),$(error PART=$(PART); expected one of: $(PARTS)))
endif

matrix: setup ## Exactness on each accepted vLLM: [VERSIONS=...] [ARGS=...]
	@$(BIN)/python scripts/matrix.py $(VERSIONS) $(ARGS)

# Without BREAK the promises have to hold; with it, those that need the part have to fail.
INTEGRATION = $(BIN)/pytest integration_tests -n 2 $(addprefix --requests ,$(or $(REQUESTS),$(if $(BREAK),60))) \
	$(addprefix --soak-s ,$(or $(SOAK_S),$(if $(BREAK),20)))

integration: setup ## The promises, also when things break: [STACK=compose] [BREAK=all]
ifeq ($(BREAK),)
	@$(if $(filter compose,$(STACK)),docker compose build engine-cpu)
	@$(INTEGRATION) --junitxml=reports/integration.xml --stack $(or $(STACK),processes) $(INTEGRATION_ARGS)
else
	@for part in $(if $(filter all,$(BREAK)),$$($(BIN)/python integration_tests/breaks.py),$(BREAK)); do \
		$(INTEGRATION) --break $$part || exit; done
endif

fuzz: setup ## Random cases against an oracle: [EXAMPLES=...] or [SECONDS=600]
	@FUZZ_EXAMPLES=$(EXAMPLES) FUZZ_SECONDS=$(or $(SECONDS),$(if $(EXAMPLES),,600)) \
		$(BIN)/pytest tests/fuzz -s --timeout 0

nightly: ## All of .ci/run, also the parts whose files have not changed
	@NIGHTLY=1 .ci/run

contract: setup ## What moved of what is used: [VLLM=0.34.0] [LMCACHE=...]
	@$(BIN)/python -m contract $(addprefix --vllm ,$(VLLM)) $(addprefix --lmcache ,$(LMCACHE)) $(ARGS)

test-containers: setup ## Build the images, test the stack on CPU in its own Docker: [ALL=1]
	@$(BIN)/pytest tests/containers $(if $(ALL),,-m "not matrix")

helm-check: setup ## Lint and test the chart, without an engine
	@$(BIN)/pytest tests/helm -m "not engine"

##@ Develop

check: setup ## Lint, format, types, order of imports; changes nothing
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

fmt: setup ## Format and fix what lint can fix
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: setup ## Renew the pages made from the code, build the site: [SERVE=1]
	@$(BIN)/python scripts/reference_docs.py
	@$(BIN)/python scripts/version_tables.py
	@$(BIN)/python scripts/site_mermaid.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@$(if $(SERVE),NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve -a 127.0.0.1:8001)

helm-docs: setup ## Renew the chart's schema and the tables of its README
	@$(BIN)/python helm/chart_schema.py && $(BIN)/python helm/chart_readme.py
	@cp helm/lmcache-xpu/values.yaml tests/helm/frozen/$$($(BIN)/lmcache-xpu --version).yaml

lock: setup ## Renew constraints.txt from pyproject.toml: [UPGRADE=1] all of it
	@$(PYTHON) scripts/bootstrap.py --lock $(if $(UPGRADE),--upgrade)

.PHONY: help setup demo clean up up-cpu logs down loadtest loadtest-compare capacity bench test matrix integration fuzz nightly contract test-containers helm-check check fmt docs helm-docs lock
