# The one entry point; CI calls these targets. `make help` lists them.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin

INTEGRATION := $(BIN)/pytest integration_tests -n 2 --junitxml=reports/integration.xml $(INTEGRATION_ARGS)

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

other-clients: setup ## Other benchmark clients beside this one: HOST=http://... [ARGS=...]
	@$(BIN)/python -m loadtests.other_clients --host $(or $(HOST),$(error HOST=http://... is missing)) $(ARGS)

pictures: setup ## Renew docs' pictures: an engine under load, Prometheus: [ARGS=...]
	@$(BIN)/python -m loadtests.pictures $(ARGS)

bench-engine: setup ## Hits and stores, beside LMCache's own: [ARGS='--report FILE']
	@$(BIN)/lmcache-xpu bench engine $(ARGS)

bench-load: setup ## Hits beside others, and conversations at once: [ARGS='--report FILE']
	@$(BIN)/lmcache-xpu bench load $(ARGS)

bench: setup ## The connectors and the demo's engine on CPU; needs a quiet machine
	@$(BIN)/python measurements/cpu_connectors.py
	@$(BIN)/python measurements/cpu_engine.py

bench-device: ## The connectors on an accelerator, in the environment of PYTHON
	@PYTHONPATH=src $(PYTHON) measurements/device_connectors.py

##@ Test

test: setup ## Unit tests, and end-to-end tests with real engines
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not (alone or matrix or tools)"
	@$(BIN)/pytest -m "alone and not (matrix or tools)"

test-tools: setup ## The demo, the benches, faults that tests have to see
	@$(BIN)/pytest -m "tools and not matrix"

test-models: setup ## Each model in each mode, LMCache's server in each way
	@$(BIN)/pytest $(addprefix tests/engine/test_,local.py models.py server.py server_soak.py waiting.py) \
		tests/helm/test_chart_side_car_engine.py

test-lmcache: LMCACHE_DIR = $(CURDIR)/build/lmcache-$(or $(LMCACHE),$(error LMCACHE=... is missing))
test-lmcache: setup ## End-to-end tests with another LMCache beside this vLLM: LMCACHE=...
	@$(BIN)/uv pip install --quiet --no-deps --target $(LMCACHE_DIR) lmcache==$(LMCACHE)
	@PYTHONPATH=$(LMCACHE_DIR) $(BIN)/pytest -m engine tests/engine tests/test_stored_by.py $(ARGS)
	@PYTHONPATH=$(LMCACHE_DIR) $(BIN)/pytest tests/tiers/disk -k l2_adapter

test-ranks: setup ## Ranks of one engine; several engines; their ends and faults
	@$(BIN)/pytest $(addprefix tests/engine/test_,ends.py server_ranks.py resets.py engines_of_one_serve.py)

matrix: setup ## Exactness on each accepted vLLM: [VERSIONS=...] [ARGS=...]
	@$(BIN)/python scripts/matrix.py $(VERSIONS) $(ARGS)

integration: setup ## The promises, also when things break, in short: [STACK=compose]
	@$(if $(filter compose,$(STACK)),docker compose build engine-cpu)
	@$(INTEGRATION) --stack $(or $(STACK),processes)

integration-long: setup ## The same in long: [REQUESTS=5000] [SOAK_S=1200]
	@$(INTEGRATION) --requests $(or $(REQUESTS),5000) --soak-s $(or $(SOAK_S),1200)

soak-server: setup ## Hits while LMCache's server is killed and stopped: [ARGS='--hits 500']
	@PYTHONPATH=src:tests $(BIN)/python -m support.server_soak $(ARGS)

integration-broken: setup ## Each test has to fail without what it is for: [PARTS=...]
	@for part in $(or $(PARTS),$$($(BIN)/python integration_tests/breaks.py)); do \
		$(BIN)/pytest integration_tests -n 2 --break $$part --requests 60 --soak-s 20 || exit; done

fuzz: setup ## Random cases against an oracle: [EXAMPLES=...] or [SECONDS=600]
	@FUZZ_EXAMPLES=$(EXAMPLES) FUZZ_SECONDS=$(or $(SECONDS),$(if $(EXAMPLES),,600)) \
		$(BIN)/pytest tests/fuzz -s --timeout 0

nightly: ## All of .ci/run, also the parts whose files have not changed
	@NIGHTLY=1 .ci/run

contract: setup ## What moved of what is used: [VLLM=0.34.0] [LMCACHE=...]
	@$(BIN)/python -m contract $(addprefix --vllm ,$(VLLM)) $(addprefix --lmcache ,$(LMCACHE)) $(ARGS)

test-containers: setup ## Build the images, test the stack on CPU in its own Docker: [ALL=1]
	@$(BIN)/pytest tests/containers $(if $(ALL),,-m "not matrix")

test-bases: setup ## Packages of every base; the XPU image on a stand-in: [VLLM=0.29.0]
	@$(BIN)/pytest tests/test_install.py tests/engine/test_packages.py
	@VLLM=$(or $(VLLM),0.29.0) $(BIN)/pytest -s tests/containers/test_bases.py

helm-check: setup ## Lint and test the chart, without an engine
	@$(BIN)/pytest tests/helm -m "not engine"

##@ Develop

check: setup ## Lint, format, types, order of imports; changes nothing
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

fmt: setup ## Format and fix what lint can fix
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: setup ## Renew the pages made from the code, build the site into site/
	@$(BIN)/python scripts/reference_docs.py
	@$(BIN)/python scripts/version_tables.py
	@$(BIN)/python scripts/site_mermaid.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: docs ## The site on this machine, at http://127.0.0.1:8001
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve -a 127.0.0.1:8001

helm-docs: setup ## Renew the chart's schema and the tables of its README
	@$(BIN)/python helm/chart_schema.py && $(BIN)/python helm/chart_readme.py
	@cp helm/lmcache-xpu/values.yaml tests/helm/frozen/$$($(BIN)/lmcache-xpu --version).yaml

helm-package: setup ## Package the chart into dist/: [REGISTRY=oci://...] pushes it
	@$(BIN)/helm package helm/lmcache-xpu -d dist
	@$(if $(REGISTRY),$(BIN)/helm push dist/lmcache-xpu-$$($(BIN)/lmcache-xpu --version).tgz $(REGISTRY))

lock: setup ## Renew constraints.txt from pyproject.toml: [UPGRADE=1] all of it
	@$(PYTHON) scripts/bootstrap.py --lock $(if $(UPGRADE),--upgrade)

.PHONY: help setup demo test test-models test-tools nightly test-ranks test-lmcache contract matrix integration integration-long soak-server integration-broken fuzz check fmt docs docs-serve bench bench-engine bench-load bench-device up up-cpu down logs test-containers test-bases helm-docs helm-check helm-package loadtest loadtest-compare capacity other-clients pictures lock clean
