# Needs make, Python 3.11 or newer and a package index. Everything is installed into .venv, once.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# The demo's prompt as it was typed: make must not expand its `$`, and the shell reads it from the environment.
override PROMPT := $(value PROMPT)
export PROMPT

# The benchmark's prompts (Spec-Bench format; without it those in experiments/prompts.jsonl), and what is measured.
override DATA := $(value DATA)
export DATA
BENCH ?= --skip-attention 3,6,7,25 --num-draft-tokens 3 --prompts-per-category 1

.PHONY: help demo bench test lint venv clean

help:
	@echo 'make demo                decode a prompt with drafting and without, side by side'
	@echo 'make demo PROMPT="..."   the same with your prompt'
	@echo 'make bench               measure every way to draft on the same checkpoint; minutes (DATA=prompts.jsonl)'
	@echo 'make test                lint, types and tests'
	@echo 'make lint                ruff and mypy only'
	@echo 'make venv                only create .venv and install everything into it'
	@echo 'make clean               remove .venv, builds and caches'
	@echo
	@echo 'PYTHON=python3.12 names another Python for .venv (now: $(PYTHON); 3.11 or newer).'
	@echo 'PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets a small torch for machines without a GPU.'

demo: $(STAMP)
	@$(BIN)/python -m layerskip.cli demo $${PROMPT:+-- "$$PROMPT"}

bench: $(STAMP)
	@model="$$($(BIN)/python -m layerskip.models.reference)" && \
		$(BIN)/python -m experiments.bench --model "$$model" --threads 2 $${DATA:+--data "$$DATA"} $(BENCH)

test: lint
	$(BIN)/pytest --numprocesses auto --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: $(STAMP)

# The stamp is written last, so that an interrupted install is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
		echo 'Expected Python 3.11 or newer, got no program named $(PYTHON).' >&2; \
		echo 'Name yours: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Expected Python 3.11 or newer, got $$("$(PYTHON)" --version 2>&1) ($$(command -v "$(PYTHON)"))." >&2; \
		echo 'Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	@echo 'Installing into .venv, once: 1 to 3 minutes, 1.3 GB.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Aside, for one test: transformers imports torchao wherever it is found, which prints some lines each time.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
		--target .venv/aside --upgrade torchao
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
