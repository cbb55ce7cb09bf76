# Two commands do all the set-up:   make demo   and   make test
# Each makes .venv when it is missing or older than its requirements, with this checkout installed in it.

PYTHON ?= python3
BIN := .venv/bin
# Two nodes on one machine share its cores: one thread a process.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Hundreds of processes import the same modules: they are compiled once.
unexport PYTHONDONTWRITEBYTECODE
BERT_RUN ?= runs/bert-$(shell date +%Y%m%d-%H%M%S)
DATA ?= data
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: learn hint faults site demo demo-elastic bert test test-all test-long test-cluster test-gpu lint format bench clean
.DEFAULT_GOAL := demo

# UNEVEN_VENVS: a folder that keeps the packages outside the checkout, one set for each requirements.txt (CI sets it).
.venv: requirements.txt .ci/tools.txt
	@PYTHON=$(PYTHON) bash .ci/make-venv

demo: .venv  ## both nodes of `-n 2 -g 3,1` on this machine, on digits that need no download
	$(BIN)/python launch_scripts/play_nodes.py mnist_ddp/mnist-distributed.py -n 2 -g 3,1 --device cpu \
	    --dataset digits --global-batch 64 --epochs 10 --out-dir $(RUN)

demo-elastic: .venv  ## a node dies and comes back, a machine joins, one leaves: the curve on top of the undisturbed one
	$(BIN)/python benchmarks/elastic_curve.py

bert: .venv  ## pretrain a small BERT on text that Python brings, then ask it for masked words; two minutes
	$(BIN)/python launch_scripts/play_nodes.py bert_ddp/bert-distributed.py -n 2 -g 3,1 --device cpu \
	    --preset tiny --dropout 0 --vocab-size 2000 --sequence-length 64 --global-batch 32 --epochs 20 --lr 2e-3 \
	    --warmup-steps 100 --clip-norm 1 --out-dir $(BERT_RUN)
	$(BIN)/python launch_scripts/fill_mask.py $(BERT_RUN)/checkpoints/latest \
	    "The method returns a [MASK] object." "The object must be an [MASK] of the class."

learn: .venv  ## the next of ten small programs with a mistake that people really make
	@$(BIN)/python mnist_ddp/exercises/learn.py || test $$? = 1

hint: .venv  ## a hint for it; again: the next one
	@$(BIN)/python mnist_ddp/exercises/learn.py --hint

# ARGS: further options of pytest, as in make test ARGS='-k exact --costs build/costs.md'
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile -v

test: .venv  ## every promise, on real processes; needs neither root nor a GPU nor a network. Minutes
	$(PYTEST) -m "not long" $(ARGS)

test-all: test test-long  ## also what takes long: every moment of a fault, fuzzing, installations, the site

test-long: .venv
	$(PYTEST) -m long $(ARGS)

test-cluster: .venv  ## real hosts, Slurm, MPI and ssh; needs root, installs Debian's packages
	bash tests/cluster/run.sh

test-gpu: .venv  ## every path that a GPU takes, on one GPU, in minutes; without one, what a CPU can do of it
	failed=0; $(BIN)/python -m pytest -m "not alone" -n $$(( $$(nproc --all) > 8 ? 4 : 1 )) tests/gpu || failed=1; \
	$(BIN)/python -m pytest -m alone tests/gpu || failed=1; exit $$failed

lint: .venv  ## format, habits, types, and which package may import which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

faults: .venv  ## what happens when something breaks, with and without --elastic; takes a while
	$(BIN)/python benchmarks/faults.py --write docs/faults.md

site: .venv  ## README and chapters as a site, in build/site; no server, nothing from the network
	$(BIN)/python .ci/site.py

bench: .venv  ## measured against peers, side by side; prints the tables of docs/benchmarks.md
	$(BIN)/python benchmarks/mnist.py --data-dir $(DATA)
	$(BIN)/python benchmarks/bert.py
	$(BIN)/python benchmarks/finetune.py --data-dir $(DATA)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
