#!/usr/bin/env bash
# Two nodes with different numbers of GPUs: 8 and 2, or those in GPUS.
# Run it once on each node, with the number of the node:
#   launch_scripts/two_node_uneven.sh TRAINER 0 [FLAGS...]                       # on node 0, which is the master
#   MASTER_ADDR=NODE0 launch_scripts/two_node_uneven.sh TRAINER 1 [FLAGS...]     # on node 1
# To try it, run both nodes on this machine:
#   GPUS=3,1 launch_scripts/two_node_uneven.sh TRAINER --local --device cpu [FLAGS...]
set -euo pipefail
usage='usage: two_node_uneven.sh TRAINER 0|1|--local [FLAGS...]'
trainer=${1:?$usage}; node=${2:?$usage}; shift 2
layout=(-n 2 -g "${GPUS:-8,2}")
case $node in
  --local) exec "${PYTHON:-python3}" "$(dirname "$0")/play_nodes.py" "$trainer" "${layout[@]}" "$@" ;;
  0 | 1) exec "${PYTHON:-python3}" "$trainer" "${layout[@]}" -i "$node" "$@" ;;
  *) echo "two_node_uneven.sh: the node is $node: 0, 1 or --local. $usage" >&2; exit 2 ;;
esac
