#!/bin/bash
# Let a Windows PC join an engine as one of its machines, through WSL2. In PowerShell:
#   wsl --install -d Ubuntu-24.04
#   wsl bash deploy/wsl/join.sh HOST:29600 /mnt/c/Users/ME/gllm-secret [FLAGS of gllm node]
# This script is checked for syntax, but has not been run on Windows.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: join.sh HOST:PORT SECRET_FILE [FLAGS of gllm node]" >&2
    exit 2
fi
head=$1
source=$2
shift 2
folder=${GLLM_HOME:-$HOME/gllm}
repository=$(cd "$(dirname "$0")/../.." && pwd)

# WSL1 has no Linux kernel, and so no pidfd and no memfd.
if ! grep -qi 'microsoft.*wsl2' /proc/sys/kernel/osrelease; then
    echo "This is not WSL2: run 'wsl --set-version Ubuntu-24.04 2' in PowerShell." >&2
    exit 1
fi
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "gllm needs Python 3.11 or newer: install a newer distribution, such as Ubuntu-24.04." >&2
    exit 1
fi

mkdir -p "$folder"
if [ ! -x "$folder/venv/bin/gllm" ]; then
    if ! python3 -m venv "$folder/venv"; then
        echo "Install venv and a compiler: sudo apt-get install python3-venv g++" >&2
        exit 1
    fi
    "$folder/venv/bin/pip" install "$repository"
fi

# Files on Windows drives can be read by everybody, which gllm refuses.
install -m 600 "$source" "$folder/secret"

# WSL2 is behind an address translation: this machine dials others (--data-port 0), and they cannot
# dial it. Two neighbouring machines of this kind need --advertise, see docs/nodes.md.
exec "$folder/venv/bin/gllm" node --join "$head" --node-secret-file "$folder/secret" \
    --data-port 0 "$@"
