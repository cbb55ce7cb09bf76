#!/usr/bin/env bash
# One process on one GPU of this machine, or on its CPU.
# Run it once, here:    launch_scripts/single_gpu.sh TRAINER [FLAGS...]
#   launch_scripts/single_gpu.sh mnist_ddp/mnist-distributed.py
#   GPU=1 launch_scripts/single_gpu.sh mnist_ddp/mnist-distributed.py --epochs 2      # the second GPU
set -euo pipefail
trainer=${1:?usage: single_gpu.sh TRAINER [FLAGS...]}; shift
exec "${PYTHON:-python3}" "$trainer" --distributed-world-size 1 --device-id "${GPU:-0}" "$@"
