#!/usr/bin/env bash
# make test-cluster: tests on real hosts, launchers and schedulers. Needs root. Installs Debian's packages where they
# are missing and says what it could not install; the tests that need those are skipped and say so.
#   tests/cluster/run.sh [PYTEST OPTIONS...]      UNEVEN_WRITE_TABLE=1 writes the table into docs/launchers.md
set -uo pipefail
cd "$(dirname "$0")/../.."
here=tests/cluster
if [[ $(id -u) != 0 ]]; then
  echo "make test-cluster: needs root to make network namespaces and to install packages: run it as root" >&2
  exit 2
fi

packages=(iproute2 iptables slurmctld slurmd slurm-client munge openmpi-bin mpich openssh-server openssh-client
  chromium)
is_installed() { [[ $(dpkg-query -W -f '${Status}' "$1" 2>/dev/null) == *"ok installed" ]]; }
install() {
  local missing=() package
  for package in "${packages[@]}"; do is_installed "$package" || missing+=("$package"); done
  [[ ${#missing[@]} == 0 ]] && return
  echo "make test-cluster: installing ${missing[*]}"
  # no service is to be started: the tests start their own
  local policy=/usr/sbin/policy-rc.d
  if [[ -e $policy ]]; then policy=''; else printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"; fi
  { timeout 300 apt-get update && DEBIAN_FRONTEND=noninteractive timeout 600 \
    apt-get install -y --no-install-recommends "${missing[@]}"; } >/tmp/uneven-cluster-apt.log 2>&1
  [[ -n $policy ]] && rm -f "$policy"
  for package in "${missing[@]}"; do
    is_installed "$package" || echo "make test-cluster: could not install $package:" \
      "$(tail -n 1 /tmp/uneven-cluster-apt.log)"
  done
  rm -f /tmp/uneven-cluster-apt.log
}
if command -v apt-get dpkg-query >/dev/null; then
  install
else
  echo "make test-cluster: no apt-get here: install ${packages[*]} by hand for all tests"
fi

exec 9</run
flock 9 # one run at a time: names of hosts and folders are this machine's. A folder's lock leaves no file behind
state=${UNEVEN_CLUSTER_DIR:-/tmp/uneven-cluster}
sweep() { # also after an interrupt that left pytest no time
  { "$here/slurm.sh" stop; "$here/sshd.sh" stop; "$here/hosts.sh" down; } >/dev/null 2>&1
  rm -rf "$state" "$state.pytest"
}
pytest=''
trap '[[ -n $pytest ]] && kill -TERM "$pytest" 2>/dev/null' INT TERM HUP
finish() {
  local code=$? left
  sweep
  left=$(ip netns list 2>/dev/null | grep uneven-; pgrep -af "$state/"; ls -d "$state" "$state.pytest" 2>/dev/null)
  [[ -z $left ]] || { printf 'make test-cluster: left behind: %s\n' "$left" >&2; code=1; }
  exit "$code"
}
trap finish EXIT

PYTHONDONTWRITEBYTECODE=1 UNEVEN_CLUSTER_LOCKED=1 .venv/bin/python -m pytest -p no:cacheprovider \
  --basetemp="$state.pytest" tests/cluster "$@" 9>&- &
pytest=$!
wait "$pytest"
code=$?
while kill -0 "$pytest" 2>/dev/null; do wait "$pytest"; code=$?; done # it takes its hosts down before it ends
exit "$code"
