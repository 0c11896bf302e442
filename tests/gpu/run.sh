#!/bin/bash
# Checks on a machine with an NVIDIA GPU, JAX for CUDA, mpi4py and no registry:
#
#   tests/gpu/run.sh MPI4JAX_WHEEL [OPENMPI_WITH_CUDA.tar.xz]
#
# MPI4JAX_WHEEL was built for the MPI that runs here (for the archive: Open MPI 4.1). It prints one table,
# and ends with the number of failures. No GPU has run it so far. Without one, the scripts can be tried on the
# stand-ins of tests/fake_gpu:
#
#   MPI4JAX_TEST_CUDA_ON_CPU=reached MPI4JAX_LIBCUDA=... MPI4JAX_LIBNCCL=... JAX_PLATFORMS=cpu tests/gpu/run.sh WHEEL
set -u
here=$(cd "$(dirname "$0")" && pwd)
wheel=$(realpath "${1:?the wheel to check}")
archive=${2:-}
out=${OUT:-$(mktemp -d)}
python=${PYTHON:-python3}
mkdir -p "$out"

packages=$out/packages
"$python" -m pip install --quiet --no-deps --no-index --target "$packages" "$wheel" || exit 99
export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}

if [ -n "$archive" ]; then
    mkdir -p "$out/mpi" && tar -xf "$archive" -C "$out/mpi" || exit 99
    mpiexec=$(find "$out/mpi" -name mpiexec | head -1)
    [ -n "$mpiexec" ] || { echo "no mpiexec in $archive" >&2; exit 99; }
    export OPAL_PREFIX=$(dirname "$(dirname "$mpiexec")")
    export PATH=$OPAL_PREFIX/bin:$PATH LD_LIBRARY_PATH=$OPAL_PREFIX/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export MPI4PY_LIBMPI=$(find "$OPAL_PREFIX/lib" -name 'libmpi.so*' | head -1)
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
# Ranks share one GPU; legacy CUDA IPC needs JAX's ordinary allocator.
export XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=${JAX_PLATFORMS:-cuda}
# NCCL takes two ranks for one GPU if each claims another host.
nccl='export NCCL_HOSTID=r${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}} NCCL_SOCKET_IFNAME=lo NCCL_MAX_CTAS=1'
nccl="$nccl NCCL_NVLS_ENABLE=0 NCCL_MULTI_RANK_GPU_ENABLE=1"

failures=0
table=$out/table.txt
: > "$table"

row() { # name, transport, ranks, seconds, command...
    local name=$1 transport=$2 ranks=$3 limit=$4 status word
    shift 4
    local log="$out/$name-$transport-$ranks.log"
    MPI4JAX_TRANSPORT=$transport timeout "$limit" mpiexec -n "$ranks" \
        bash -c "$nccl; exec \"\$@\"" check "$@" > "$log" 2>&1
    status=$?
    case $status in
        0) word=passed ;;
        77) word="cannot be used here" ;;
        124) word="no end after $limit s" ; failures=$((failures + 1)) ;;
        *) word="FAILED ($status)" ; failures=$((failures + 1)) ;;
    esac
    printf '%-16s %-9s %s ranks  %s\n' "$name" "$transport" "$ranks" "$word" | tee -a "$table"
    sed -n 's/^| /    /p' "$log" | tee -a "$table"
}

"$python" -c 'import jax; print(jax.__version__, jax.devices())' 2>&1 | tee -a "$table"
for transport in staged cuda-mpi nccl ucx; do
    for ranks in 1 2; do
        row ops "$transport" "$ranks" 120 "$python" "$here/ops.py"
        row bandwidth "$transport" "$ranks" 120 "$python" "$here/bandwidth.py"
    done
done
row graph nccl 1 60 "$python" "$here/graph.py"
model=$here/../../examples/shallow_water.py
for ranks in 1 2; do
    row shallow-water staged "$ranks" 180 "$python" "$model" --benchmark
done
if command -v compute-sanitizer > /dev/null; then
    row sanitizer staged 1 300 compute-sanitizer --error-exitcode 9 "$python" "$here/ops.py"
fi
echo "$failures failures; logs in $out"
exit "$failures"
