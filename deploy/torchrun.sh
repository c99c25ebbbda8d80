#!/bin/bash
# One engine over several machines, started by torchrun. Run the same line on each of them:
#   deploy/torchrun.sh HEAD NUM_MACHINES RANK MODEL [FLAGS]
# gllm reads rank, number of machines and the head's address from the variables of torchrun. This
# script is checked for syntax, but has not been run on several machines.
set -euo pipefail
# Code in the current directory is not imported.
export PYTHONSAFEPATH=1

head=$1
num_machines=$2
rank=$3
model=$4
shift 4
secret=${GLLM_NODE_SECRET_FILE:-$HOME/gllm-secret}
num_stages=${GLLM_PP:-$num_machines}

# One process per machine: gllm starts the workers of a machine itself. torchrun ends its machine's
# part when that fails, and restarts it; port 29400 is its own rendezvous.
exec torchrun --nnodes "$num_machines" --node-rank "$rank" --nproc-per-node 1 \
    --master-addr "$head" --master-port 29400 --max-restarts 100 \
    -m gllm.serve "$model" --pp "$num_stages" --host 0.0.0.0 \
    --node-secret-file "$secret" --shutdown-timeout 30 "$@"
