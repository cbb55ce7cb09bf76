#!/usr/bin/env bash
# On one CUDA GPU. First the step of BERT-base against transformers.Trainer: bf16, lengths 128 and 512, tokens/s and
# utilisation against the card's measured matrix rate. Then the trainers themselves (gpu_trainers.py).
#     benchmarks/gpu.sh                  needs torch and transformers, no data and no network
#     benchmarks/gpu.sh --tiny           the same code on a CPU in minutes, to see that it runs
#     benchmarks/gpu.sh trainers [...]   the trainers alone, all four parts; needs --data-dir with MNIST and WNUT 17
set -euo pipefail
cd "$(dirname "$0")/.."
export TOKENIZERS_PARALLELISM=false
if [[ -x .venv/bin/python ]]; then own=.venv/bin/python; else own=python3; fi
if [[ ${1:-} == trainers ]]; then
  exec "${PYTHON:-$own}" benchmarks/gpu_trainers.py "${@:2}"
fi
failed=0
"${PYTHON:-$own}" benchmarks/gpu.py "$@" || failed=$?
case ${1:-} in
"") "${PYTHON:-$own}" benchmarks/gpu_trainers.py --only pretrain ;;
--tiny) "${PYTHON:-$own}" benchmarks/gpu_trainers.py "$@" ;;
esac
exit $failed
