#!/usr/bin/env bash
# The layouts of HetSeq's documentation, and 8+2, in HetSeq's own flags.
# Run it once on each node. NODE is the number of the node. MEETING is the address of rank 0, or a file that all nodes
# share:
#   launch_scripts/hetseq.sh one-gpu TRAINER [FLAGS...]                  # the second GPU of this machine
#   launch_scripts/hetseq.sh one-node TRAINER [FLAGS...]                 # four GPUs of this machine
#   MEETING=tcp://NODE0:11111 NODE=0 launch_scripts/hetseq.sh four-nodes TRAINER [FLAGS...]      # and NODE=1, 2, 3
#   MEETING=file:///shared/communicate.txt NODE=0 launch_scripts/hetseq.sh four-nodes TRAINER    # and NODE=1, 2, 3
#   MEETING=tcp://NODE0:11111 NODE=0 launch_scripts/hetseq.sh uneven TRAINER [FLAGS...]          # 8+2; and NODE=1
# GPUS=A,B,... sets other numbers of GPUs for the nodes of four-nodes and uneven.
set -euo pipefail
usage='usage: hetseq.sh one-gpu|one-node|four-nodes|uneven TRAINER [FLAGS...]'
layout=${1:?$usage}; trainer=${2:?$usage}; shift 2

of_node() { # of_node A,B,...: the world size, the GPUs of node NODE, and its first rank
  local sizes=(${1//,/ }) size
  world=0 first=0
  for size in "${sizes[@]}"; do world=$((world + size)); done
  for size in "${sizes[@]:0:${NODE:?give NODE=0, 1, ...}}"; do first=$((first + size)); done
  flags=(--distributed-init-method "${MEETING:?give MEETING=tcp://NODE0:PORT or file:///SHARED/FILE}"
    --distributed-world-size "$world" --distributed-gpus "${sizes[$NODE]}" --distributed-rank "$first")
}

case $layout in
  one-gpu) flags=(--distributed-world-size 1 --device-id "${GPU:-1}") ;;
  one-node) flags=(--distributed-world-size "${GPUS:-4}") ;;
  four-nodes) of_node "${GPUS:-4,4,4,4}" ;;
  uneven) of_node "${GPUS:-8,2}" ;;
  *) echo "hetseq.sh: no layout $layout. $usage" >&2; exit 2 ;;
esac
exec "${PYTHON:-python3}" "$trainer" "${flags[@]}" "$@"
