#!/usr/bin/env bash
# make test-cluster: tests on real hosts, launchers and schedulers. Needs root and Debian's packages.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ $(id -u) != 0 ]]; then
  echo "make test-cluster: needs root to make network namespaces and to install packages: run it as root" >&2
  exit 2
fi
exec .venv/bin/python -m pytest tests/cluster
