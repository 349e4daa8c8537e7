#!/usr/bin/env bash
# A Ray cluster inside a Slurm job, and one wdsprep command on all of it:
#
#   sbatch tools/examples/cluster/slurm.sh encode /data/images /data/latents-256 --resolution 256
#
# Change: the lines below, and add what makes wdsprep available on a node (a module, a virtual
# environment that all nodes see). The data must be at a path that all nodes share, or on s3://.
# A job that is preempted, or runs out of time, goes on where it was when it is started again.
#
#SBATCH --job-name=wdsprep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

cpus=$SLURM_CPUS_PER_TASK
gpus=${SLURM_GPUS_ON_NODE:-0}
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a node
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN # others on these machines are kept out
RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

on() { # NODE COMMAND...: as a step beside the others there, in place of the shell that calls
    exec srun --nodes=1 --ntasks=1 --nodelist="$1" --cpus-per-task="$cpus" --overlap "${@:2}"
}
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

read -r address _ < <(on "${nodes[0]}" hostname --ip-address)
shape=(--num-cpus="$cpus" --num-gpus="$gpus" --disable-usage-stats --block)
on "${nodes[0]}" ray start --head --node-ip-address="$address" --port="$port" "${shape[@]}" &
until ray health-check --address "$address:$port" 2>/dev/null; do
    kill -0 $! # ends the job where the head could not start
    sleep 1
done
for node in "${nodes[@]:1}"; do
    on "$node" ray start --address="$address:$port" "${shape[@]}" &
done

wdsprep "$@" --ray-address "$address:$port" # nodes that come up later are used as they come
