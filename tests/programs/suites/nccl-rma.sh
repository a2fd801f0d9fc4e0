# shellcheck shell=bash
# NCCL's puts and signals, and GIN from kernels, over sockets with our libgdrapi and by our plug-in: two ranks on two GPUs, no card

# shellcheck disable=SC2034
packages=()

skip() {
    echo "== nccl-rma"
    echo "skipped: $1"
    exit 77
}

# The folder with `include` and `lib` of NCCL 2.32 or newer: NCCL_HOME, or a wheel (nvidia-nccl-cu13).
nccl_home() {
    local home
    home=${NCCL_HOME:-$(python3 -c 'import nvidia.nccl as nccl; print(list(nccl.__path__)[0])' 2>/dev/null)}
    [ -e "$home/include/nccl.h" ] || return
    awk '/define NCCL_VERSION_CODE/ { exit !($3 >= 23200) }' "$home/include/nccl.h" || return
    echo "$home"
}

nccl=$(nccl_home) || skip "needs NCCL 2.32 or newer with its headers: NCCL_HOME=PATH, or the wheel nvidia-nccl-cu13"
[ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -ge 2 ] || skip "needs two GPUs"
[ -n "${NCCL_RMA_PROGRAM:-}" ] || command -v nvcc >/dev/null || skip "needs nvcc"

export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_GDRCOPY_ENABLE=1 NCCL_DEBUG=INFO

# shellcheck source=tests/programs/cuda.sh
. "$here/cuda.sh"

# The program; NCCL_RMA_PROGRAM names one that is built already.
build() {
    if [ -n "${NCCL_RMA_PROGRAM:-}" ]; then
        ln -sf "$NCCL_RMA_PROGRAM" nccl-rma
        return
    fi
    ln -sf "$nccl/lib/libnccl.so.2" libnccl.so
    nvcc -std=c++17 -O2 -arch=native -I "$nccl/include" -I "$repository/nccl/include" -L . -o nccl-rma \
        "$here/suites/nccl-rma.cu" -lnccl -ldl
}

# runs WHAT NAME PLUGIN VARIABLE=VALUE...: the data, and that it went this way.
runs() {
    local name="$1, $2" what=$1 plugin=$3
    check "$name" "^$what: both ranks: all data right" env "${@:4}" timeout "$patience" ./nccl-rma "$what"
    check "$name: by $plugin" . grep -E "Assigned plugin $plugin to comm" "$(log_of "$name")"
}

# Rank 1 is lost before, in or after a put: the stream of rank 0 ends, and so does ncclCommAbort.
loses() {
    local how mode when name
    for how in kill stop; do
        for mode in eager graph; do
            for when in before in after; do
                name="rank 1 is lost: $how, $mode, $when"
                check "$name" '^fault: the GPU is usable' env "$@" timeout 120 ./nccl-rma fault "$how" "$mode" "$when"
            done
        done
    done
}

programs() {
    c_libraries gdrapi gdasync-nccl
    # The driver's own.
    rm -f "$lib"/libcuda.so*
    local plugin=$lib/libnccl-rma-gda.so
    [ -e "$plugin" ] || ln -s "$target/debug/libnccl_rma_gda.so" "$plugin"
    check 'build' '' build
    ((failed == 0)) || return 0
    local -x LD_LIBRARY_PATH=$lib:$nccl/lib:${LD_LIBRARY_PATH:-}
    local what
    for what in put gin; do
        # Each rank a team of its own: then neither NVLink nor shared memory serves.
        runs $what 'teams of one' RMA_SOCKET_PROXY NCCL_LSA_TEAM_SIZE=1
        runs $what 'P2P and shared memory off' RMA_SOCKET_PROXY NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
        runs $what 'plug-in' GDA NCCL_LSA_TEAM_SIZE=1 NCCL_RMA_PLUGIN="$plugin"
    done
    loses NCCL_LSA_TEAM_SIZE=1 NCCL_RMA_PLUGIN="$plugin"
}
