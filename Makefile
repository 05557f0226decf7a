# Each target does its own set-up: the first run creates .venv and installs what it needs, later ones reuse it.
# PYTHON names the interpreter for a new .venv (any Python >= 3.10).  PYTEST_ARGS goes to pytest.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help test demo kill-matrix chaos crash syscalls zombies flips histories fuzz lint format docs changelog clean tools
.DELETE_ON_ERROR:

help:
	@echo "make test    run the tests             make demo    watch a job lose a rank and finish"
	@echo "make lint    style, types, imports     make docs    build the documentation"
	@echo "make format  rewrite in house style    make clean   remove what was built"
	@echo "make kill-matrix     kill ranks in every phase of a save, a hundred times: some minutes"
	@echo "make chaos           a job on three hosts under ten minutes of faults"
	@echo "make crash           every crash state, every failing call, planted bugs: some minutes"
	@echo "make syscalls        every fourth system call of real processes fails: some minutes"
	@echo "make zombies         processes that sleep through a take-over, stopped before each of their calls: minutes"
	@echo "make fuzz            ten minutes of hostile records and manifests"
	@echo "make histories       a hundred thousand histories of restarts and zombies against a naive twin"
	@echo "make flips           ten thousand flipped bits, each of which must be reported"

# The stamp is written last, so an install that failed or was interrupted is tried again.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@./.ci/venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(STAMP)
	@rm -f $@
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

tools:
	@./.ci/tools

test: $(STAMP) tools
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

kill-matrix: $(STAMP) tools
	@$(BIN)/python tests/kill_matrix.py $(KILL_ARGS)

chaos: $(STAMP) tools
	@$(BIN)/python tests/chaos.py $(CHAOS_ARGS)

crash: $(STAMP)
	@$(BIN)/python tests/crash.py $(CRASH_ARGS)

syscalls: $(STAMP) tools
	@$(BIN)/python tests/syscalls.py $(SYSCALLS_ARGS)

zombies: $(STAMP)
	@$(BIN)/python tests/zombies.py $(ZOMBIES_ARGS)

histories: $(STAMP)
	@$(BIN)/python tests/histories.py $(HISTORIES_ARGS)

fuzz: $(STAMP)
	@mkdir -p $(VENV)/fuzz
	@$(BIN)/python tests/fuzz_records.py -max_total_time=600 $(FUZZ_ARGS) $(VENV)/fuzz tests/fuzz_corpus

flips: $(STAMP)
	@$(BIN)/python tests/flips.py $(FLIPS_ARGS)

# Every check runs, whichever fails.
lint: $(STAMP)
	@failed=0; \
	$(BIN)/ruff check --output-format concise || failed=1; \
	$(BIN)/ruff format --check --output-format concise || failed=1; \
	$(BIN)/mypy || failed=1; \
	$(BIN)/mypy --config-file tests/mypy.ini tests examples docs || failed=1; \
	$(BIN)/lint-imports --no-cache >$(VENV)/lint-imports.txt || { cat $(VENV)/lint-imports.txt; failed=1; }; \
	tail -n 2 $(VENV)/lint-imports.txt; \
	exit $$failed

format: $(STAMP)
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: $(VENV)/.installed-docs
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

changelog: $(STAMP)
	@$(BIN)/towncrier build --draft --version next

clean:
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	rm -rf $(VENV)
