# What can be done here? Every target makes `.venv` itself when it is missing or stale.
#
#   make demo    train a small model under FSDP2, convert its checkpoint, open the result
#                (make demo SRC=checkpoint DST=folder [CONFIG=folder] converts your own)
#   make up      start PostgreSQL, Prefect, a worker and the webhook receiver on this machine
#                (make up UP="--prefect-port 4300 --root /runs --exports /models")
#   make down    end them; a run that does not end in a minute goes on after the next `make up`
#   make test    `make check`, and the tests beside it
#   make quick   a test or two of each room and family, before a commit: no servers, under a minute on 2 cores
#   make check   format, lint, types, layers, migrations, generated tables
#   make bench   measure against the peers, print the table
#   make soak    the long repeats that `make test` leaves out
#   make versions VERSIONS="lowest python3.13"
#                `make quick` with the lowest versions of pyproject.toml, or on another Python (downloads gigabytes)
#   make fuzz    change real checkpoints, and texts of every parser, a million times; guided by coverage, too
#   make docs    write the generated tables of docs/ and CONTRIBUTING.md, and the picture of the rooms
#   make site    build the documentation site from docs/, into build/site
#   make clean   remove what these targets made

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules
# Tests start some hundred processes: none of them compiles the modules that another has compiled.
unexport PYTHONDONTWRITEBYTECODE

# python3 of PATH, or the system's own where that is faster.
PYTHON ?= $(shell ./.ci/python)
# Tests wait for servers and processes a good part of their time: five at once keep two cores busy.
JOBS ?= 5
# Debian packages that a test needs, installed by set-up where missing: by root only, and elsewhere
# these tests are skipped. The catalog page is looked at in Chromium, which draws no text without a font.
DEBIAN_PACKAGES := postgresql chromium fonts-dejavu-core fuse3

bin := .venv/bin
python := $(bin)/python
stamp := .venv/.stamp
# One source of truth for the pin: pip needs it on the command line too, so that the resolver
# does not first fetch the newest torch.
torch := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
paths := ckptcore tasks flows deployments alembic tests docs

.PHONY: help demo up down test quick check bench soak versions fuzz docs site clean \
  check-types check-style check-layers check-migrations check-docs

help:
	@sed -n 's/^#   //p' Makefile

demo: $(stamp)
	@$(python) -m flows.demo $(if $(SRC),--src "$(SRC)") $(if $(DST),--dst "$(DST)")

up: $(stamp)
	@$(python) -m deployments.local up $(UP)

down: $(stamp)
	@$(python) -m deployments.local down $(DOWN)

# Tests wait a good part of their time: what `check` needs is there then. What it finds is printed when it has
# found it, and fails the target; the line with the number of tests is the last one of a good run.
test: $(stamp)
	@failed=$$(mktemp -u); trap 'rm -f "$$failed"' EXIT; \
	{ $(MAKE) check || touch "$$failed"; } & check=$$!; \
	$(python) -m pytest -n $(JOBS) || tests=$$?; wait $$check; \
	if [ -e "$$failed" ]; then echo "make check failed: what it found is above, among the tests" >&2; exit 1; fi; \
	exit $${tests:-0}

quick: $(stamp)
	@$(python) -m pytest -n $(JOBS) -q -k 'not postgresql' @tests/quick.txt

# In parallel: half of it is mypy.
check: $(stamp)
	@$(MAKE) -j2 --output-sync=target check-types check-style check-layers check-migrations check-docs

check-types:
	@$(bin)/mypy

check-style:
	@$(bin)/ruff format --check --quiet $(paths) || { echo "run: $(bin)/ruff format $(paths)" >&2; exit 1; }
	@$(bin)/ruff check --quiet $(paths)

check-layers:
	@$(bin)/lint-imports --no-logo > .venv/layers.log || { cat .venv/layers.log >&2; exit 1; }

check-migrations:
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	export CKPTCORE_CATALOG_URL="sqlite:///$$folder/catalog.db"; \
	{ $(bin)/alembic upgrade head && $(bin)/alembic check; } > "$$folder/log" 2>&1 || { cat "$$folder/log" >&2; exit 1; }

check-docs:
	@$(python) tests/architecture/readme_tables.py --check
	@$(python) tests/architecture/rooms.py --check
	@$(python) tests/architecture/walks.py --check
	@$(python) tests/architecture/words.py --check

bench: $(stamp)
	@$(python) tests/benchmarks/run.py

soak: $(stamp)
	@$(python) -m pytest -m soak -n $(JOBS)

VERSIONS ?= lowest
versions: $(stamp)
	@$(python) tests/versions/run.py --jobs $(JOBS) $(VERSIONS)

INPUTS ?= 1000000
fuzz: $(stamp)
	@$(bin)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]' $(torch)
	@$(python) tests/fuzz/fuzz.py --inputs $(INPUTS)
	@$(python) tests/fuzz/texts.py --inputs $(INPUTS)
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(python) tests/fuzz/guided.py "$$folder" -atheris_runs=$$(($(INPUTS) / 10)) -print_final_stats=1

docs: $(stamp)
	@$(python) tests/architecture/readme_tables.py --write
	@$(python) tests/architecture/rooms.py --write
	@$(python) tests/architecture/walks.py --write

# -E -a: the command-line page and every navigation change with files that Sphinx does not watch.
site: $(stamp)
	@$(python) -m sphinx -q -E -a -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

clean:
	@rm -rf .venv build dist demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find ckptcore tasks flows deployments alembic tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(stamp): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@for package in $(DEBIAN_PACKAGES); do \
	  dpkg -s "$$package" > /dev/null 2>&1 || ./.ci/debian "$$package" || \
	  echo "without the Debian package $$package the tests that need it are skipped" >&2; done
	@echo "setting up .venv (some minutes the first time)" >&2
	@$(python) -c pass 2> /dev/null || $(PYTHON) -m venv --clear .venv
	@$(bin)/pip install --quiet --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[flows,hf,dev,docs]' $(torch)
	@# On all cores, where pip takes one. Some packages have templates that are no Python: pip passes over them, too.
	@$(python) -m compileall -qq -j 0 .venv/lib || true
	@touch $@
