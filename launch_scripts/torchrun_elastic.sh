#!/usr/bin/env bash
# torchrun that starts all nodes' processes again when one fails, from the last checkpoint.
# Run it on each node, once, with the number of its GPUs; any node may come first:
#   MASTER_ADDR=NODE0 launch_scripts/torchrun_elastic.sh TRAINER 8 --out-dir /shared/run [FLAGS...]
#   MASTER_ADDR=NODE0 launch_scripts/torchrun_elastic.sh TRAINER 2 --out-dir /shared/run [FLAGS...]
# NODES is the number of nodes (2), RESTARTS how often (3), JOB a name of this job, the same on every node.
set -euo pipefail
usage='usage: MASTER_ADDR=NODE0 torchrun_elastic.sh TRAINER GPUS --out-dir DIR [FLAGS...]'
trainer=${1:?$usage}; gpus=${2:?$usage}; shift 2
# The agents' own store keeps keys of the processes that have failed, on which the next ones stumble.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes "${NODES:-2}" --nproc-per-node "$gpus" \
  --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:?$usage}:${MASTER_PORT:-29500}" --rdzv-id "${JOB:-uneven}" \
  --max-restarts "${RESTARTS:-3}" "$trainer" --resume=auto "$@"
