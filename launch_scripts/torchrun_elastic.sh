#!/usr/bin/env bash
# torchrun that restarts the processes of all nodes when one fails, from the last checkpoint.
# Run it once on each node, in any order, with the number of GPUs of that node:
#   MASTER_ADDR=NODE0 launch_scripts/torchrun_elastic.sh TRAINER 8 --out-dir /shared/run [FLAGS...]
#   MASTER_ADDR=NODE0 launch_scripts/torchrun_elastic.sh TRAINER 2 --out-dir /shared/run [FLAGS...]
# NODES is the number of nodes (2), RESTARTS the most restarts (3), JOB the name of this job, the same on every node.
set -euo pipefail
usage='usage: MASTER_ADDR=NODE0 torchrun_elastic.sh TRAINER GPUS --out-dir DIR [FLAGS...]'
trainer=${1:?$usage}; gpus=${2:?$usage}; shift 2
# The store of the agents keeps keys of the failed processes, which would confuse the new ones: do not share it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes "${NODES:-2}" --nproc-per-node "$gpus" \
  --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:?$usage}:${MASTER_PORT:-29500}" --rdzv-id "${JOB:-uneven}" \
  --max-restarts "${RESTARTS:-3}" "$trainer" --resume=auto "$@"
