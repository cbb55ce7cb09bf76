#!/usr/bin/env bash
# torchrun on nodes with different numbers of GPUs.
# Run it once on each node, with the number of the node and the number of its GPUs:
#   MASTER_ADDR=NODE0 launch_scripts/torchrun_uneven.sh TRAINER 0 8 [FLAGS...]      # on node 0
#   MASTER_ADDR=NODE0 launch_scripts/torchrun_uneven.sh TRAINER 1 2 [FLAGS...]      # on node 1
# NODES is the number of nodes (2), MASTER_PORT the port on node 0 (29500).
set -euo pipefail
usage='usage: MASTER_ADDR=NODE0 torchrun_uneven.sh TRAINER NODE GPUS [FLAGS...]'
trainer=${1:?$usage}; node=${2:?$usage}; gpus=${3:?$usage}; shift 3
# Static, not c10d: the ranks follow the order of the nodes, and rank 0 is on node 0.
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes "${NODES:-2}" --node-rank "$node" \
  --nproc-per-node "$gpus" --master-addr "${MASTER_ADDR:?$usage}" --master-port "${MASTER_PORT:-29500}" \
  "$trainer" "$@"
