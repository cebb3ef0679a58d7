# `make` lists the targets. The first one that you ask for makes .venv and installs what it needs.
PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Compiling all that PyTorch brings costs a minute; --no-compile leaves it to the first import of what is used.
PIP_ARGS ?= -qq --no-compile

export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE
python := .venv/bin/python
# A stamp says that an install is complete. One that was killed leaves .venv/installing: then no stamp counts.
stamps := .venv/installed .venv/installed-test .venv/installed-docs .venv/installed-types
$(shell [ ! -e .venv/installing ] || rm -f $(stamps))

.PHONY: help demo test bench findings docs lint types clean
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 8

demo: .venv/installed ## where does counting break in the toy? a table, and a report in runs/demo
	@$(python) -m circuits counting diagnose --model tiny --out runs/demo

test: .venv/installed-test ## run all tests; PYTEST_ARGS="-k sites -x" runs some
	@OMP_NUM_THREADS=1 $(python) -m pytest $(PYTEST_ARGS)

bench: .venv/installed ## measure speed against its limits, to .bench/bench.json; SIZE=small is quick
	@OMP_NUM_THREADS=1 $(python) -m tests.bench $(BENCH_ARGS)

findings: .venv/installed ## measure tiny, heads and paper again, and write docs/findings/counting.md (half an hour)
	@$(python) -m circuits counting paper --out runs/paper
	@cp runs/paper/findings.md docs/findings/counting.md

docs: .venv/installed-docs ## build the site in docs/_build/html, running its notebooks
	@$(python) -m sphinx -qEW --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

lint: .venv/installed-test ## check style and import layers, as the tests do
	@$(python) -m ruff check && $(python) -m ruff format --check
	@$(python) -c "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"

types: .venv/installed-types ## check types; the tests check shapes as they run
	@$(python) -m basedpyright

clean: ## remove all that make made, but for runs
	rm -rf .venv .bench dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find circuits interp tests docs -name __pycache__ -prune -exec rm -rf {} +

extra = $(patsubst .venv/installed-%,[%],$(filter-out .venv/installed,$@))
$(stamps): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "'$(PYTHON)' is not Python 3.11 or newer with venv: install it (Debian: apt install python3-venv)," \
	    "or name another: make PYTHON=..." >&2; exit 1; }
	@echo "installing vlm-circuits$(extra) in .venv: about 2 minutes the first time," \
	  "more where PyTorch comes with CUDA (3 GB)"
	@if [ -e .venv/installing ] || ! $(python) -c 'import pip' 2>/dev/null; then rm -rf .venv; fi
	@mkdir -p .venv && touch .venv/installing
	@[ -e $(python) ] || $(PYTHON) -m venv .venv
	@$(python) -m pip install $(PIP_ARGS) -c requirements.lock -e '.$(extra)' || { code=$$?; \
	  [ $$code -ge 128 ] || rm .venv/installing; \
	  echo "the install failed; for more: make $@ PIP_ARGS=-v" >&2; exit $$code; }
	@touch .venv/installed $@ && rm .venv/installing
