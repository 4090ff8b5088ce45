# `make help` lists what there is. The work is done by dev/setup, dev/test and the package fleet_local.
.DEFAULT_GOAL := help
.PHONY: cancels other-engines rolling cases rules fuzz fuzz-router chaos-router promises soak scheduler-run scheduler-profile help setup setup-python up down status test check up-kill replay \
  bench-choice bench-router router-profile bench-runtime format clean
PYTHON := .venv/bin/python
export PATH := $(PATH):$(CURDIR)/.setup/uv/bin

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: setup ## set up, start the local cluster, install the chart, run the quickstart and ask one question (root)
	@$(PYTHON) -m fleet_local.quickstart

down: setup-python ## end and remove the local cluster; only the cache stays (root)
	@$(PYTHON) -m fleet_local.cli down

status: ## what of the local cluster runs
	@$(PYTHON) -m fleet_local.cli status

setup: ## virtual environment, Debian packages, cluster binaries, bundled model; a second when all is there
	@dev/setup

setup-python: ## the virtual environment only
	@dev/setup python

test: setup ## lint, types, import contracts, all tests; the end-to-end tests start and remove a cluster of their own
	@dev/test all

check: setup-python ## the fast part of `test`: lint, types, import contracts, tests without model
	@dev/test check

fuzz: setup ## the long fuzz: 10,000 bodies of our own and as many of schemathesis to a real worker (BODIES=N)
	@PYTHONPATH=tests/support .venv/bin/python -m fleet_testing.fuzz --bodies $(or $(BODIES),10000)

fuzz-router: setup-python ## the long fuzz of the router: 10,000 connections with bytes that nobody should send (ARGS='--connections N --seed S')
	@PYTHONPATH=tests/support $(PYTHON) -m fleet_testing.fuzz_router $(ARGS)

chaos-router: setup-python ## the long test: 10 minutes of killed clients and workers at 500 requests/s (ARGS='--workers 2 --kill-router-every 5': and of the router's own processes)
	@PYTHONPATH=tests/support $(PYTHON) -m fleet_testing.chaos_router $(ARGS)

promises: setup-python ## design rules of the router at their full size: memory, endings and digests of 10,000 requests, a restart (ARGS='R8 R21')
	@PYTHONPATH=tests/support $(PYTHON) -m fleet_testing.promises $(ARGS)
other-engines: setup ## the router in front of a real vLLM on this machine, check by check; installs vLLM (9 GB) the first time (ARGS='--checks a,b')
	@PYTHONPATH=tests/support $(PYTHON) -m fleet_testing.other_engines $(ARGS)

cases: setup ## one line for each fault from the field: which have a passing test
	@PYTHONPATH=tests/support .venv/bin/python -m fleet_testing.case_report

rules: setup-python ## the router's design rules, and the tests that prove each
	@PYTHONPATH=tests/support $(PYTHON) -m fleet_testing.rules

soak: setup ## the long test: 10,000 mixed requests with aborts, errors and retractions; then nothing may be left
	@PYTHONPATH=tests/support .venv/bin/python -m fleet_testing.soak

scheduler-run: setup ## the long test: 100,000 random steps of the scheduler over an engine whose right answers are known
	@PYTHONPATH=tests/support .venv/bin/python -m fleet_testing.scheduler_run --plain --steps 100000
	@PYTHONPATH=tests/support .venv/bin/python -m fleet_testing.scheduler_run --steps 50000

scheduler-profile: setup ## where the microseconds of a scheduler step go, at 32 rows
	@.venv/bin/python -m fleet_runtime.scheduler.profile

rolling: setup ## the long test: everything restarted three times on a real cluster at 50 requests/s, none may fail (ARGS='--rounds N --rate R'; root)
	@PYTHONPATH=tests/support $(PYTHON) -m fleet_testing.rolling $(ARGS)

cancels: setup-python ## the long test: 1,000 random cancels of each prefill/decode protocol; then no KV may be pinned
	@RADIXFLEET_TEST_CANCELS=1000 .venv/bin/pytest -q tests/router/test_other_pairs.py -k random_cancels

up-kill: setup ## the long test: SIGKILL `up` after every step and run it again (root)
	@.venv/bin/pytest -q -ra e2e/cluster/test_killed_anywhere.py --kill-everywhere

replay: setup-python ## the routing rule against seven others in a simulated fleet; TRACES=DIR: with the Mooncake traces, and all gates
	@$(PYTHON) -m fleet_router.replay $(if $(TRACES),--traces $(TRACES))

bench-choice: setup-python ## what a routing decision costs; fails when one is over its bound
	@$(PYTHON) -m fleet_router.decide.bench

bench-router: setup ## our router beside sglang-router and smg in one run; ARGS='--help' for less
	@.venv/bin/python -m fleet_bench.router $(ARGS)

router-profile: setup ## where the microseconds of a routed request go, stage by stage
	@.venv/bin/python -m fleet_router.profile $(ARGS)

bench-runtime: setup ## our runtime beside vLLM and llama.cpp in one run, about an hour on a quiet machine; ARGS='--help' for less
	@.venv/bin/python -m fleet_bench.peers $(ARGS)

format: setup-python ## format the code and sort imports
	@.venv/bin/ruff check --quiet --fix . ; .venv/bin/ruff format .

clean: ## remove what tools and set-up left in this folder (not the cache in ~/.cache/radixfleet)
	@rm -rf .setup .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
