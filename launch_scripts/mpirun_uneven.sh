#!/usr/bin/env bash
# mpirun (Open MPI) or mpiexec (MPICH, Intel MPI) on nodes with different numbers of GPUs, over ssh.
# Run it once, on any node that can reach the others by ssh:
#   launch_scripts/mpirun_uneven.sh NODE0:8,NODE1:2 TRAINER [FLAGS...]
# Rank 0 runs on the first host. SSH_CONFIG names a configuration file for ssh. torch itself needs no MPI.
set -euo pipefail
usage='usage: mpirun_uneven.sh HOST:GPUS,HOST:GPUS TRAINER [FLAGS...]'
hosts=${1:?$usage}; trainer=${2:?$usage}; shift 2
mpirun=${MPIRUN:-mpirun}
command=("${PYTHON:-python3}" "$trainer" "$@")
address=${MASTER_ADDR:-${hosts%%:*}}
count=0
for host in ${hosts//,/ }; do count=$((count + ${host##*:})); done

if [[ $("$mpirun" --version 2>&1) =~ Open\ ?(MPI|RTE) ]]; then
  options=(--oversubscribe --bind-to none -x "MASTER_ADDR=$address")
  [[ -n ${UNEVEN_DDP_SECRET:-} ]] && options+=(-x UNEVEN_DDP_SECRET)
  [[ -n ${SSH_CONFIG:-} ]] && options+=(--mca plm_rsh_args "-F $SSH_CONFIG")
  [[ $(id -u) == 0 ]] && options+=(--allow-run-as-root)
  exec "$mpirun" "${options[@]}" --host "$hosts" -np "$count" "${command[@]}"
fi
[[ -n ${SSH_CONFIG:-} ]] && export HYDRA_LAUNCHER_EXTRA_ARGS="-F $SSH_CONFIG"
exec "$mpirun" -launcher ssh -hosts "$hosts" -genv MASTER_ADDR "$address" -n "$count" "${command[@]}"
