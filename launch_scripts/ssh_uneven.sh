#!/usr/bin/env bash
# Starts every node of a list over ssh, from one terminal. Prints the name of the node before each of its lines. When
# one node fails, the others are ended.
# Run it once, on any machine that can reach the nodes by ssh:
#   launch_scripts/ssh_uneven.sh NODE0:8,NODE1:2 TRAINER [FLAGS...]
# The checkout must be at the same path on every node. The first node is the master; the others reach it by its name in
# the list, or by MASTER_ADDR. SSH_CONFIG names a configuration file for ssh.
set -euo pipefail
usage='usage: ssh_uneven.sh HOST:GPUS,HOST:GPUS TRAINER [FLAGS...]'
[[ -z ${UNEVEN_DDP_SECRET:-} ]] || { echo 'ssh_uneven.sh: ssh does not pass UNEVEN_DDP_SECRET on: give --secret-file' >&2; exit 2; }
list=${1:?$usage}; trainer=${2:?$usage}; shift 2
nodes=(${list//,/ })
gpus=$(IFS=,; echo "${nodes[*]##*:}")
address=${MASTER_ADDR:-${nodes[0]%%:*}}
ssh=(ssh -o BatchMode=yes ${SSH_CONFIG:+-F "$SSH_CONFIG"})

# On the node: run the command in its own session, and end the whole session when the input from ssh ends.
far='exec 3<&0; setsid "$@" </dev/null 3<&- & node=$!
  { cat <&3; kill -TERM -- "-$node"
    for second in {1..30}; do sleep 1; kill -0 -- "-$node" || exit; done
    kill -KILL -- "-$node"; } >/dev/null 2>&1 &
  wait "$node"'

# Here: fd 9 is the only writer of that input. It is closed when this script ends for any reason.
pipes=$(mktemp -d); mkfifo "$pipes/hold" "$pipes/codes"
exec 9<>"$pipes/hold" 7<"$pipes/hold" 8<>"$pipes/codes"; rm -r "$pipes"
trap 'exec 9>&-; interrupted=130' INT TERM

for index in "${!nodes[@]}"; do
  host=${nodes[$index]%%:*}
  command=(env ${OMP_NUM_THREADS:+OMP_NUM_THREADS="$OMP_NUM_THREADS"} "${PYTHON:-python3}" "$trainer"
    -n "${#nodes[@]}" -g "$gpus" -i "$index" --master-addr "$address" --master-port "${MASTER_PORT:-29500}" "$@")
  remote="cd $(printf %q "$PWD") && exec bash -c $(printf %q "$far") node$(printf ' %q' "${command[@]}")"
  { "${ssh[@]}" "$host" "$remote" <&7 && echo 0 >&8 || echo $? >&8; } 9>&- 2>&1 |
    while IFS= read -r line; do printf '%s | %s\n' "$host" "$line"; done 9>&- &
done

failed=0 ended=0
while ((ended < ${#nodes[@]})); do # when one node fails, end the others
  read -r -t 1 code <&8 || continue
  ended=$((ended + 1))
  if ((code != 0 && failed == 0)); then failed=$code; exec 9>&-; fi
done
wait
exit "${interrupted:-$failed}"
