# Every target works from a fresh clone: `venv` makes what is missing and is instant when nothing is.
PY ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
PYTHON := .venv/bin/python
# Extra arguments for the program behind a target, e.g. make test ARGS="tests/chat -k tool"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo serve test clients check format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: ## make the environment (outside the clone, shared; the first time downloads the engine)
	@$(PY) scripts/environment.py

demo: venv ## serve the tiny model on the CPU, run the coding agent against it, stop everything
	@$(PYTHON) scripts/demo.py $(ARGS)

serve: venv ## serve the tiny model on the CPU until Ctrl-C
	@$(PYTHON) -m k3_sglang.launch --config configs/tiny.yaml $(ARGS)

test: venv ## run all tests
	@$(PYTHON) -m pytest $(ARGS)

clients: venv ## run real agent clients against the gateway and write the matrix (installs them outside the clone)
	@$(PYTHON) -m clients $(ARGS)

check: venv ## lint, formatting, types
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m ruff format --check
	@$(PYTHON) -m pyright --pythonpath $(PYTHON)

format: venv ## rewrite the sources in the project's format, and docs/files.md
	@$(PYTHON) -m ruff check --fix --quiet
	@$(PYTHON) -m ruff format
	@$(PYTHON) scripts/file_tree.py --write

clean: ## remove what this clone generated (the shared environment stays)
	@rm -rf .venv .venv.lock .build build dist ./*.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
