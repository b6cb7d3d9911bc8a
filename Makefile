# Needs Python 3.10 or newer and make. Everything else is installed into .venv.

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Tests spend most of their time waiting: four processes use two cores well, and six if the long tests run too.
# A crashed process fails the run: pytest-xdist may hang if it replaces one.
DIST := --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
SPREAD ?= --numprocesses 4 $(DIST)
SPREAD_ALL ?= --numprocesses 6 $(DIST)
# Tests start hundreds of processes, each of which would compile everything that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:  ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: .venv/demo  ## Charge a day of webhooks, and kill processes meanwhile (PLAIN=1: plain Celery, SHADOW=1: count only)
	@$(BIN)/python -m examples.payments $(if $(PLAIN),--plain) $(if $(SHADOW),--shadow)

.PHONY: test
test: .venv/test  ## Run the tests, except those of further deployments and the long ones: five minutes
	$(PYTEST) $(SPREAD) -m 'not exhaustive'

.PHONY: test-all
test-all: .venv/test  ## Run all tests: about fifteen minutes
	$(PYTEST) $(SPREAD_ALL)

.PHONY: exhaustive
exhaustive: .venv/test  ## Run the tests that make test leaves out
	$(PYTEST) $(SPREAD_ALL) -m exhaustive

.PHONY: coverage
coverage: .venv/test  ## Run the tests of make test, and report which lines and branches they reach
	@$(BIN)/coverage erase
	@$(MAKE) test PYTEST='$(BIN)/coverage run -m pytest'
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

.PHONY: bench
bench: .venv/test .venv/bench  ## Measure the overhead, and compare other libraries (ONLY=live; WRITE=1 into docs/)
	@$(BIN)/python -m labs.benchmarks $(if $(ONLY),--only $(ONLY)) $(if $(WRITE),--write) \
		$(if $(JSON),--json $(JSON)) $(if $(MINUTES),--minutes $(MINUTES))

.PHONY: soak
soak: .venv/test .venv/bench  ## Compare the growth of all processes with plain Celery's under load, with a fault every half minute (MINUTES= WRITE=1)
	@SOAK_MINUTES=$(or $(MINUTES),20) $(BIN)/python -m labs.benchmarks --only soak --minutes 100000 $(if $(WRITE),--write)

.PHONY: peers
peers: .venv/test .venv/peers  ## Compare with plain Celery and four other libraries, two of them in environments of their own
	@$(BIN)/python -m labs.comparison

.PHONY: outages
outages: .venv/test  ## Cause every kind of outage while workers run, and count lost and repeated calls
	@$(BIN)/python -m labs.outages

.PHONY: chaos
chaos: .venv/test  ## Inject faults by a seeded schedule, also for other libraries (SEEDS=20 TASKS=1000 PEERS=6 SEED= OURS=1 TRANSACTION=1)
	@$(BIN)/python -m labs.chaos $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(TASKS),--tasks $(TASKS)) $(if $(PEERS),--peers $(PEERS)) $(if $(OURS),--ours) $(if $(TRANSACTION),--transaction)

.PHONY: late
late: .venv/test  ## Let Redis execute commands late, or freeze it for less than a lease, and count the broken promises (ROUNDS=20 ONLY=)
	@$(BIN)/python -m labs.late $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ONLY),--only $(ONLY))

.PHONY: bursts
bursts: .venv/test  ## Publish bursts while processes and Redis are killed: each key's last run has the newest arguments (SEEDS=20)
	@$(BIN)/python -m labs.newest burst --seeds $(or $(SEEDS),20)

.PHONY: versions
versions: .venv/test  ## The same faults with workers of this and another commit, then of this one alone, then of the other alone (OLD=commit SEEDS= TASKS= SEED=)
	@$(BIN)/python -m labs.chaos --old $(or $(OLD),HEAD~1) --tasks $(or $(TASKS),3000) $(if $(SEED),--seed $(SEED)) --seeds $(or $(SEEDS),6)

.PHONY: proof
proof: .venv/test  ## Search the model, compare the scripts with it, run mutation tests: about five minutes
	@$(BIN)/python -m labs.verification

.PHONY: canvases
canvases: .venv/test  ## Publish chains, chords, retries and duplicates while processes are killed, beside plain Celery (SEEDS= CANVASES= OURS=1 PEERS=1)
	@$(BIN)/python -m labs.canvases $(if $(SEEDS),--seeds $(SEEDS)) $(if $(CANVASES),--canvases $(CANVASES)) $(if $(OURS),--ours) $(if $(PEERS),--peers)

.PHONY: redelivery
redelivery: .venv/test  ## Kill whole workers under load, and time how soon their messages begin elsewhere (TRIALS= AFTER= LEASE=); FAULTS=1: a table of faults; COST=1: the cost of 1,000 messages; HOUR=1: the deliveries of a living worker
	@$(BIN)/python -m labs.redelivery$(if $(HOUR),.hour)$(if $(FAULTS),.faults)$(if $(COST),.cost) $(if $(TRIALS),--trials $(TRIALS)) $(if $(AFTER),--after $(AFTER)) $(if $(LEASE),--lease $(LEASE))

.PHONY: images
images: .venv/test  ## Write the images of the dashboard to docs/images, with Debian's Chromium
	@$(BIN)/python -m docs.generate_images

.PHONY: matrix
matrix: .venv/test  ## Run the core tests with each supported Python and Celery
	@$(BIN)/python -m labs.matrix $(if $(CORNERS),--corners) -- $(SPREAD)

.PHONY: rehearsal
rehearsal: .venv/test  ## Build the distributions, and follow the tutorial from each of them with each installed Python
	@$(BIN)/python -m labs.rehearsal

.PHONY: lint
lint: .venv/dev  ## Check style, types, import contracts and words of an earlier vocabulary
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/typing
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.readthedocs .readthedocs.yaml
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/codespell celery_idempotent lua examples tests labs docs .github README.md CONTRIBUTING.md CHANGELOG.md Makefile

.PHONY: docs
docs: .venv/docs  ## Build the documentation site into dist/docs
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs dist/docs

.PHONY: linkcheck
linkcheck: .venv/docs  ## Follow the documentation's links to other sites
	@$(BIN)/python -m sphinx -q -b linkcheck docs dist/linkcheck

.PHONY: clean
clean:  ## Remove everything that these commands create
	rm -rf .venv .chaos .matrix .peers dist build htmlcov .coverage .coverage.* .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp file per dependency group, renewed when pyproject.toml changes. dev includes test, and test includes demo.
.venv/demo .venv/test .venv/dev .venv/docs .venv/peers .venv/bench: pyproject.toml | $(BIN)/python
	@echo "installing the dependency group $(@F) into .venv"
	@$(PIP) 'pip>=25.1'  # the first one with groups
	@$(PIP) --editable . --group $(@F)
	@touch $(if $(filter dev,$(@F)),.venv/demo .venv/test) $(if $(filter test,$(@F)),.venv/demo) $@

$(BIN)/python:
	@$(PYTHON) -m venv .venv
