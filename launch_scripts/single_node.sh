#!/usr/bin/env bash
# One process for each GPU of this machine, or GPUS processes.
# Run it once, here:    launch_scripts/single_node.sh TRAINER [FLAGS...]
#   launch_scripts/single_node.sh mnist_ddp/mnist-distributed.py
#   GPUS=4 launch_scripts/single_node.sh mnist_ddp/mnist-distributed.py --device cpu
set -euo pipefail
trainer=${1:?usage: single_node.sh TRAINER [FLAGS...]}; shift
layout=()
[[ -n ${GPUS:-} ]] && layout=(-n 1 -g "$GPUS" -i 0)
exec "${PYTHON:-python3}" "$trainer" "${layout[@]}" "$@"
