#!/usr/bin/env bash
# All GPUs of this machine, or as many processes as GPUS says.
# Run it once, here:    launch_scripts/single_node.sh TRAINER [FLAGS...]
#   launch_scripts/single_node.sh mnist_ddp/mnist-distributed.py
#   GPUS=4 launch_scripts/single_node.sh mnist_ddp/mnist-distributed.py --device cpu
set -euo pipefail
trainer=${1:?usage: single_node.sh TRAINER [FLAGS...]}; shift
layout=()
[[ -n ${GPUS:-} ]] && layout=(-n 1 -g "$GPUS" -i 0)
exec "${PYTHON:-python3}" "$trainer" "${layout[@]}" "$@"
