# Every target that needs Python packages installs them into .venv.
# Python 3.11 to 3.14: the first of these that runs, or say make PYTHON=/path/to/python.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DEMO := .venv/.installed-demo

.PHONY: demo test test-fast test-rest test-all check docs format hooks release wheels bench measure-here gpu clean

# The developers' tools are installed with all that the demo needs.
demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(INSTALLED_DEMO))
	$(BIN)/gmmvit demo --output demo-output --force

# One more than there are cores, four at most: tests often wait for a server or a browser.
WORKERS := $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 1 : 4)))

# If a worker crashes, the run stops and names its test.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart 0
# Fast tests never wait, so they get no worker more than there are cores.
PYTEST_FAST := $(BIN)/python -m pytest -n $(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4))) --max-worker-restart 0
UNIT := not (integration or nightly or alone)

# make test has checked the shapes in signatures (pyproject.toml).
UNTYPED := --jaxtyping-packages=

# Other CPU instructions and another order of sums than this machine's; no test may depend on them.
OTHER_ARITHMETIC := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 OMP_NUM_THREADS=1
NO_AMX := ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 OMP_NUM_THREADS=1
NUMERIC := $(addprefix tests/,models/scores models/layers models/folding models/families checkpoints parity)

# docs/pages/developing.md states what each target holds.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PYTEST) --dist worksteal -m "not (nightly or alone)"

test-fast: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PYTEST_FAST) --dist worksteal -m "$(UNIT)"

# All tests that make test leaves out, the numeric unit tests with other arithmetic, and last, one at a time, those that
# judge a time.
test-rest: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PYTEST) $(UNTYPED) --dist loadfile --no-loadscope-reorder -m "nightly and not alone"
	OMP_WAIT_POLICY=PASSIVE $(OTHER_ARITHMETIC) $(PYTEST_FAST) $(UNTYPED) --dist worksteal -m "$(UNIT)" $(NUMERIC)
	if grep -q amx_int8 /proc/cpuinfo; then $(NO_AMX) $(PYTEST_FAST) tests/runtimes/kernels/test_product_chains.py; fi
	if grep -q avx512f /proc/cpuinfo; then $(AVX2) $(PYTEST) $(UNTYPED) --dist worksteal -m "$(UNIT)" $(NUMERIC); fi
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m alone

test-all: test test-rest

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=.ci $(BIN)/lint-imports
	$(BIN)/python benchmarks/tables.py --check
	$(MAKE) --no-print-directory docs

# A warning fails the build. The extension in docs/ is found by PYTHONPATH.
docs: $(INSTALLED)
	PYTHONPATH=docs $(BIN)/zensical build --strict --clean --config-file docs/zensical.toml

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Check format, lint and types of each commit from now on; undo: git config --unset core.hooksPath
hooks: $(INSTALLED)
	git config core.hooksPath .githooks

# Build what a release uploads, check it, and use the wheel of this platform with every supported Python of this
# machine. PyTorch is installed for each of them. make release ARGS="--python 3.11 --rehearsal": with this Python, before the release.
release: $(INSTALLED)
	PYTHONPATH=.ci $(BIN)/python -m release $(ARGS)

# Build into dist, and do no more: the pure wheel, and those that hold compiled CPU kernels (x86-64, 64-bit ARM).
wheels: $(INSTALLED)
	PYTHONPATH=.ci $(BIN)/python -m release --build-only --rehearsal

# Run in this order. Two more need a GPU, and before_after.py needs a second checkout.
BENCHMARKS := engines parity_limits fastest_cpu mask_cost served where_time_goes timm_models timm_sweep one_image \
  overload gateway_cost two_models hostile rollout ten_models

bench: $(INSTALLED)
	set -e; for script in $(BENCHMARKS); do $(BIN)/python benchmarks/$$script.py; done
	@if nvidia-smi >/dev/null 2>&1; then \
	  for script in fastest_gpu masked_attention_gpu; do $(BIN)/python benchmarks/$$script.py; done; \
	else echo "no GPU here: fastest_gpu.py and masked_attention_gpu.py are left out"; fi

# Ten minutes of measurements of this machine, from one core to all, beside the committed results: measured-here.
# make measure-here NNCF=PYTHON: also beside NNCF's int8; the Python of an environment with nncf, openvino and onnx.
measure-here: $(INSTALLED)
	$(BIN)/python benchmarks/measure_here.py $(if $(NNCF),--nncf $(NNCF))

# On a machine with an NVIDIA GPU and TensorRT (.venv/bin/pip install tensorrt): build an engine of a ViT-S in fp16,
# compare its logits, measure latency and memory, then run the tests that need a GPU, in at most eight minutes. The
# bundle before them needs no GPU. Without a GPU, this is a rehearsal: it ends where the engine is built. On a GeForce or
# workstation GPU, make gpu FLAVOR=tensorrt-rtx needs no further package.
FLAVOR := tensorrt
GPU := gpu-output
BUNDLE := $(GPU)/bundle
ENGINE := --engine $(GPU)/engine --runner
GPU_TESTS := $(BIN)/python -m pytest -m "gpu and not nightly"

gpu: $(BUNDLE)/graphs/fp16.onnx
	$(GPU_TESTS) --collect-only --quiet --quiet
	rm -rf $(GPU)/engine $(GPU)/*.*
	timeout 480 $(MAKE) --no-print-directory --keep-going $(addprefix $(GPU)/,parity.html bench.json memory.txt tests.xml)

$(BUNDLE)/graphs/fp16.onnx: | $(INSTALLED)
	$(BIN)/python -c "import gmmvit_deploy, timm, torch; torch.manual_seed(0); \
	  gmmvit_deploy.export(timm.create_model('vit_small_patch16_224').eval(), '$(BUNDLE)', mean=[0.5] * 3, std=[0.5] * 3, \
	  example=torch.zeros(1, 3, 224, 224), resize='stretch-bilinear', precisions='fp16', force=True)"

$(GPU)/engine/model.plan:
	$(BIN)/gmmvit build $(BUNDLE) --precision fp16 --flavor $(FLAVOR) --batch 1:8:64 -o $(GPU)/engine

$(GPU)/parity.html: $(GPU)/engine/model.plan
	$(BIN)/gmmvit parity $(BUNDLE) $(ENGINE) eager-gpu,$(FLAVOR) --report $@

$(GPU)/bench.json: $(GPU)/engine/model.plan
	$(BIN)/gmmvit bench $(BUNDLE) $(ENGINE) eager-gpu,compile-gpu,$(FLAVOR) --synthetic --samples 64 --batch 1,8,64 \
	  --rounds 5 --seconds 2 --output $@

# Of the whole GPU, in MiB, five times a second.
$(GPU)/memory.txt: $(GPU)/engine/model.plan
	nvidia-smi --id=0 --query-gpu=memory.used --format=csv,noheader,nounits --loop-ms=200 >$@ & sampler=$$!; \
	  $(BIN)/gmmvit bench $(BUNDLE) $(ENGINE) $(FLAVOR) --synthetic --samples 64 --batch 64 --no-roofline \
	  --rounds 3 --seconds 1; \
	  status=$$?; kill $$sampler; exit $$status
	@echo "GPU memory: $$(head -1 $@) MiB before, at most $$(sort -n $@ | tail -1) MiB with the engine"

$(GPU)/tests.xml:
	$(GPU_TESTS) --junit-xml $@

clean:
	rm -rf .venv .venv-kserve demo-output gpu-output measured-here dist docs/site docs/.cache

$(INSTALLED): EXTRA := dev
$(INSTALLED_DEMO): EXTRA := bench,demo
$(INSTALLED) $(INSTALLED_DEMO): pyproject.toml .ci/constraints.txt
	@test -n "$(PYTHON)" || { echo "Error: no Python 3.11 to 3.14 found"; echo "hint: install one, or say make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[$(EXTRA)]'
	touch $@
