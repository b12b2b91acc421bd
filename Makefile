# Every target makes the environment it needs; PYTHON and VENV choose which.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt

.PHONY: demo test lint check clean

demo: $(VENV)/.demo
	$(BIN)/mxcompile demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) build dist *.egg-info demo_out

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --editable '.[demo]' -c $(CONSTRAINTS)
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --editable '.[demo,test,lint]' -c $(CONSTRAINTS)
	touch $@ $(VENV)/.demo
