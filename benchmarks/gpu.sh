#!/usr/bin/env bash
# BERT-base pretraining on one CUDA GPU against transformers.Trainer: bf16, lengths 128 and 512.
# Prints tokens/s, utilisation against the card's measured matrix rate, and the ratio. Under ten minutes.
#     benchmarks/gpu.sh            needs torch and transformers, no data and no network
#     benchmarks/gpu.sh --tiny     the same code on a CPU in seconds, to see that it runs
set -euo pipefail
cd "$(dirname "$0")/.."
export TOKENIZERS_PARALLELISM=false
if [[ -x .venv/bin/python ]]; then own=.venv/bin/python; else own=python3; fi
exec "${PYTHON:-$own}" benchmarks/gpu.py "$@"
