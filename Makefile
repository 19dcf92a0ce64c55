# One verb a chore; `make help` lists them. Every verb does its own set-up: only Python >= 3.11 and make are needed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# The first Python that is new enough; `make PYTHON=/path/to/python ...` overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# Those that `make wheels` compiles for and `make test-wheels` tries.
PYTHONS ?= $(PYTHON)

# The first one that `requires-python` admits.
OLDEST := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)

VENV := .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
NATIVE := .native
NATIVE_READY := $(NATIVE)/.installed
NATIVE_TESTS := tests/native tests/golden $(addprefix tests/unit/core/,cluster/test_rebalance.py placing/test_copies.py \
	placing/test_known_defects.py placing/test_scheduler_interface.py placing/test_splits.py \
	policies/test_e2.py policies/test_preble_policy.py prefixes/test_index_memory.py replica) \
	$(addprefix tests/property/test_,global_scheduler.py radix_tree.py local_scheduler.py local_fairness.py kv_packed.py) \
	tests/engines/test_kv_translation.py tests/engines/test_zmtp.py
CONSTRAINTS := requirements/constraints.txt
PACKAGED := pyproject.toml README.md LICENSE src
# What is built in a copy does not see the repository.
BUILD_COMMIT ?= $(shell git describe --always --dirty --exclude='*' --abbrev=12 2>/dev/null)
export BUILD_COMMIT
# pip compiles what it installs: without .pyc files every start is twice as slow. Not --quiet: its log says why it failed.
PIP := -m pip --disable-pip-version-check --no-input
PIP_INSTALL := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python $(PIP) install
# Runs a silent command and says every 10 s that it still runs; with a log, the command is silenced, and its last lines are
# shown if it fails.
PATIENTLY := $(PYTHON) dev/patiently.py
INSTALLING := $(PATIENTLY) --log $(VENV)/install.log
COMPILING := $(PATIENTLY) --log $(NATIVE)/install.log

# Which engine `make demo` uses: vllm (two real replicas on the CPU) or emulator (four emulated ones).
ENGINE ?= vllm
DEMO_OUT ?= build/demo
NOTEBOOK := docs/howto/from-python.ipynb
PYTEST_ARGS ?=
# The ends of the ranges in pyproject.toml, as uv resolves them.
ENDS ?= lowest-direct highest
SBOM_TOOLS := 'cyclonedx-bom>=7.2,<8' 'pip-licenses>=5.5,<6'
LICENCES := Apache|BSD|ISC|MIT|Mozilla Public License 2.0|MPL-2.0|PSF-2.0|Python Software Foundation
# fastokens names no licence; its own LICENSE file is the Apache License.
UNNAMED := fastokens
# They only compute, so they run beside the engines, which leave CPU time over.
COMPUTING := tests/docs tests/property tests/unit/lab
BESIDE_LOG := build/test-beside-engines.log
# Tests of our own code and processes: a file at a time on each core. Those that start processes of others come after them,
# in two runs beside each other: an engine that starts uses one core alone.
ENGINES := vllm or sglang
OTHERS := $(ENGINES) or envoy or ray or clients
ON_ALL_CORES := -n auto --dist loadfile
CHAOS_ARGS ?=
COMPILED ?= yes

.PHONY: help demo test test-fast test-light test-kubernetes test-native test-wheels test-dependencies sbom chaos native lint format types docs docs-serve bench repro golden engines servers wheels constraints notebook reference clean distclean
.PHONY: environments checks compiled-wheel test-beside-engines

help: ## Show the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

# ---- set-up: each stamp stands for one finished installation ------------------------------------------------------

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "make: no Python >= 3.11 found; install one or say make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "make: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(DEV): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "make: installing the package with its development tools into $(VENV) (about 0.5 GB)"
	@$(INSTALLING) "installing the development tools" $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[plot,dev]'
	@touch $@

$(DOCS): $(DEV)
	@echo "make: installing the documentation tools into $(VENV)"
	@$(INSTALLING) "installing the documentation tools" $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

# Writes the compiled wheel of a Python into a folder. From a copy: the compiler leaves its modules beside the sources, where
# they would be imported instead of them.
define COMPILE
@rm -rf build/native && mkdir -p build/native/dev && cp -r $(PACKAGED) build/native/ && cp dev/commit_hook.py build/native/dev/
@$(PATIENTLY) --log build/compiling.log "compiling" env HATCH_BUILD_HOOK_ENABLE_MYPYC=1 PIP_CONSTRAINT=$(CONSTRAINTS) \
	$(1)/bin/python $(PIP) wheel --no-deps -w $(2) ./build/native
@rm -rf build/native
endef

# The dependencies first, then the compiled package over the plain one.
$(NATIVE_READY): pyproject.toml $(CONSTRAINTS) $(shell find src/preble/core -name "*.py")
	@command -v cc >/dev/null || { echo "make: no C compiler (cc) found, so the core cannot be compiled" >&2; exit 3; }
	@echo "make: compiling the core into $(NATIVE) (about a minute)"
	@$(PYTHON) -m venv $(NATIVE)
	@$(COMPILING) "installing what the core's tests need" env -u PYTHONDONTWRITEBYTECODE \
		$(NATIVE)/bin/python $(PIP) install -c $(CONSTRAINTS) '.[dev]'
	@rm -rf $(NATIVE)/wheel
	$(call COMPILE,$(NATIVE),$(NATIVE)/wheel)
	@env -u PYTHONDONTWRITEBYTECODE $(NATIVE)/bin/python $(PIP) install --quiet \
		--force-reinstall --no-deps $(NATIVE)/wheel/*.whl
	@touch $@

# COMPILED=no leaves the compiled wheels out. Releases are built by .github/workflows/wheels.yml.
wheels: $(DEV) ## Build what PyPI gets: source package, pure wheel, a compiled wheel for each of PYTHONS (dist/)
	@rm -rf dist && $(BIN)/hatchling build -d dist
	@if [ "$(COMPILED)" != no ]; then \
	  for python in $(PYTHONS); do $(MAKE) --no-print-directory compiled-wheel PYTHON="$$python"; done; fi
	@ls -l dist

compiled-wheel: # of PYTHON, into dist/
	@echo "make: compiling for $$($(PYTHON) --version)"
	@rm -rf build/compiler && $(PYTHON) -m venv build/compiler
	$(call COMPILE,build/compiler,dist)

# From dist/ and a folder that is filled from the index first, without any network.
test-wheels: $(DEV) ## Install dist/ into an empty environment of each of PYTHONS, and use it; each extra alone
	@$(BIN)/python benchmarks/repro/packages.py $(PYTHONS) --extras

native: $(NATIVE_READY) ## Install the package with its core compiled into .native/ (needs a C compiler)

# The same tests of the core, on the compiled one. Where there is no compiler they are left out; with CI=true that fails.
test-native: ## The tests of both halves of the core on the compiled one
	@$(MAKE) --no-print-directory native || { status=$$?; [ "$${CI:-}" != true ] && ! command -v cc >/dev/null && exit 0; exit $$status; }
	@if [ -e $(NATIVE_READY) ]; then PREBLE_TEST_NATIVE=1 $(NATIVE)/bin/pytest -p no:cacheprovider -m 'not plain' $(NATIVE_TESTS); fi

# Of what the container image holds: Preble, its libraries and those of the extras that deploy/Containerfile names.
# A library whose licence is none of LICENCES fails: somebody has to read it first.
sbom: | $(BIN)/python ## Write what a release is made of: a list of its parts (CycloneDX) and their licences (dist/)
	@rm -rf build/sbom && mkdir -p dist && $(PYTHON) -m venv build/sbom/parts && $(PYTHON) -m venv build/sbom/tools
	@$(PATIENTLY) --log build/sbom/install.log "installing what is listed" build/sbom/parts/bin/python $(PIP) install \
		-c $(CONSTRAINTS) "$$(sed -n "s/.*pip install .*'\(.*\)'/\1/p" deploy/Containerfile)"
	@$(PATIENTLY) --log build/sbom/tools.log "installing what lists it" build/sbom/tools/bin/python $(PIP) install $(SBOM_TOOLS)
	@build/sbom/parts/bin/python $(PIP) --quiet uninstall --yes pip setuptools
	@build/sbom/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		-o dist/sbom.cdx.json build/sbom/parts
	@build/sbom/tools/bin/pip-licenses --python build/sbom/parts/bin/python --from mixed --format markdown --with-urls \
		> dist/licenses.md
	@! sed 1,2d dist/licenses.md | grep -vE '$(LICENCES)|^\| ($(UNNAMED)) ' || { echo "make: read these licences first" >&2; exit 1; }
	@echo "make: $$(sed 1,2d dist/licenses.md | wc -l) parts: dist/sbom.cdx.json, dist/licenses.md"

# For the oldest Python that `requires-python` admits, whichever runs this: pip would resolve for that one.
constraints: ## Pin what CI installs again (requirements/constraints.txt)
	@rm -rf build/constraints-venv
	@$(PYTHON) -m venv build/constraints-venv
	@build/constraints-venv/bin/python $(PIP) install --quiet uv
	@{ echo "# Exact versions that CI and \`make\` install. Made by \`make constraints\`; not edited by hand."; \
	   build/constraints-venv/bin/uv pip compile --quiet --upgrade --python-version $(OLDEST) \
	   --no-annotate --no-header --extra plot --extra dev --extra docs pyproject.toml; } > build/constraints.txt
	@mv build/constraints.txt $(CONSTRAINTS) && rm -rf build/constraints-venv

engines: ## Install real vLLM and SGLang for the CPU and make the tiny model (.engines/, about 5 GB, once)
	@$(PYTHON) dev/setup.py vllm sglang

servers: ## Install the servers of other projects that tests run (.servers/, about 2.4 GB, once)
	@$(PYTHON) dev/setup.py servers

# What cannot be had on this machine (status 3) is left out, and its tests skip and say why; with CI=true that is a failure.
environments:
	@$(PYTHON) dev/setup.py vllm sglang servers || { status=$$?; [ $$status = 3 ] && [ "$${CI:-}" != true ]; }

# ---- chores -----------------------------------------------------------------------------------------------------

demo: $(DEV) ## Round robin against the default policy on real engines (ENGINE=emulator: nothing heavy to install)
	@if [ "$(ENGINE)" = vllm ]; then $(PYTHON) dev/setup.py vllm; fi
	@$(BIN)/preble demo --engine $(ENGINE) --out $(DEMO_OUT)

# The environments are made beside the quick checks, which also set up Preble's own. Every run of pytest comes to its end.
test: ## Everything that CI checks: lint, types, docs, all tests, real engines and servers
	@$(MAKE) --no-print-directory -j2 checks environments
	@$(if $(strip $(PYTEST_ARGS)),$(BIN)/pytest $(PYTEST_ARGS); $(MAKE) --no-print-directory test-native,status=0; \
	  $(BIN)/pytest --durations=20 $(ON_ALL_CORES) -m 'not ($(OTHERS))' $(addprefix --ignore=,$(COMPUTING)) || status=$$?; \
	  mkdir -p build; $(MAKE) --no-print-directory test-beside-engines > $(BESIDE_LOG) 2>&1 & beside=$$!; \
	  trap 'kill $$beside 2>/dev/null || true' EXIT; \
	  $(BIN)/pytest --durations=20 -m '$(ENGINES)' || status=$$?; \
	  wait $$beside || status=$$?; cat $(BESIDE_LOG); exit $$status)

test-beside-engines:
	@status=0; $(MAKE) --no-print-directory test-native || status=$$?; \
	  $(BIN)/pytest --durations=20 -m 'not ($(OTHERS))' $(COMPUTING) || status=$$?; \
	  $(BIN)/pytest --durations=20 -m '($(OTHERS)) and not ($(ENGINES))' || status=$$?; exit $$status

test-kubernetes: $(DEV) ## Test discovery and leases against the cluster of KUBECONFIG, in a namespace of their own
	@[ -n "$(KUBECONFIG)" ] || { echo "make: say which cluster: make test-kubernetes KUBECONFIG=FILE" >&2; exit 2; }
	@PREBLE_TEST_KUBECONFIG="$(KUBECONFIG)" $(BIN)/python -m pytest tests/kubernetes $(PYTEST_ARGS)

test-fast: $(DEV) ## The unit tests, on every core: a minute
	@$(BIN)/pytest $(ON_ALL_CORES) -m 'not slow' tests/unit tests/docs $(PYTEST_ARGS)

test-light: test-fast ## test-fast, and the other tests that are not slow; what is not installed is skipped
	@$(BIN)/pytest -m 'not slow' --ignore=tests/unit --ignore=tests/docs $(PYTEST_ARGS)

# An hour and a million requests: make chaos CHAOS_ARGS='--minutes 60 --rate 285 --vllm 0 --json chaos.json'
# Not the pinned versions of $(CONSTRAINTS): whoever runs `pip install preble` has others.
test-dependencies: | $(BIN)/python ## The tests that are not slow, with the oldest and the newest libraries that pyproject.toml admits
	@rm -rf build/ends && $(PYTHON) -m venv build/ends/uv && build/ends/uv/bin/python $(PIP) install --quiet uv
	@status=0; for end in $(ENDS); do echo "make: $$end"; \
	  build/ends/uv/bin/uv venv --quiet --python "$$(command -v $(PYTHON))" build/ends/$$end; \
	  build/ends/uv/bin/uv pip install --quiet --python build/ends/$$end/bin/python --compile-bytecode \
	    --resolution $$end -e '.[plot,dev]'; \
	  build/ends/$$end/bin/python -m pytest -p no:cacheprovider $(ON_ALL_CORES) -m 'not slow and not ($(OTHERS))' \
	    $(PYTEST_ARGS) || status=$$?; \
	done; exit $$status

chaos: $(DEV) ## Kill, hang, flood, fill disks and restart under load for 5 minutes; ends with a table (CHAOS_ARGS='--help')
	@PYTHONPATH=tests $(BIN)/python -m chaos $(CHAOS_ARGS)

checks: # one after the other, beside other jobs
	@for verb in lint types docs; do $(MAKE) --no-print-directory $$verb; done

lint: $(DEV) ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(DEV) ## Let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(DEV) ## mypy, strict, on src
	@$(PATIENTLY) "checking types" $(BIN)/mypy

docs: $(DOCS) ## Build the documentation strictly into site/
	@NO_MKDOCS_2_WARNING=1 $(PATIENTLY) "building the documentation" $(BIN)/mkdocs build --strict
	@echo "make: documentation built: site/index.html"

docs-serve: $(DOCS) ## Show the documentation on http://127.0.0.1:8001 while you write
	@$(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

reference: $(DEV) ## Write what is generated: pages of commands, settings, metrics and files, dashboard, alert rules
	@$(BIN)/python dev/commands_page.py
	@$(BIN)/python dev/settings_page.py
	@$(BIN)/python dev/files_page.py
	@$(BIN)/python dev/monitoring/generate.py

# Jupyter has an environment of its own: nobody but the writer of a notebook needs it.
notebook: | $(BIN)/python ## Run the notebook of docs/howto, and keep what it prints and draws
	@rm -rf build/notebook && $(PYTHON) -m venv build/notebook
	@$(PATIENTLY) --log build/notebook.log "installing Jupyter" build/notebook/bin/python $(PIP) install -c $(CONSTRAINTS) \
		-e '.[plot]' nbconvert ipykernel
	@cp $(NOTEBOOK) build/notebook/run.ipynb
	@build/notebook/bin/jupyter nbconvert --log-level ERROR --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False build/notebook/run.ipynb
	@mv build/notebook/run.ipynb $(NOTEBOOK)

bench: $(DEV) native ## The micro-benchmarks and the bound of preble against least load, on the compiled core
	@for f in benchmarks/micro/*.py benchmarks/repro/bound.py; do echo "== $$f"; $(NATIVE)/bin/python "$$f"; done

repro: $(DEV) ## Simulate and draw the figures of docs/concepts/rebalancing.md (about 3 minutes)
	@for f in benchmarks/repro/burst.py benchmarks/repro/hot_prefix.py; do echo "== $$f"; $(BIN)/python "$$f"; done

golden: $(DEV) ## Rewrite the golden files; review the diff before you commit
	@PREBLE_REWRITE_GOLDEN=1 $(BIN)/pytest tests/golden $(PYTEST_ARGS)
	@git --no-pager diff --stat -- tests/golden

clean: ## Remove what builds and tests leave
	@rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environments and engines too
	@rm -rf .venv .native .engines .servers
