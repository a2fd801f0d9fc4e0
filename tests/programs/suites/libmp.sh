# shellcheck shell=bash
# LibMP's programs without kernels, unmodified, over libmp.so.2 and a simulated GPU, on the card and on the software HCA

# shellcheck disable=SC2034
packages=(
    mpirun.openmpi:openmpi-bin mpicxx.openmpi:libopenmpi-dev g++:g++ git:git python3:python3
    /etc/libibverbs.d/mlx5.driver:ibverbs-providers
)
patience=${PATIENCE:-400}

# shellcheck source=tests/programs/cuda.sh
. "$here/cuda.sh"

build() {
    local program compile libraries=(-L "$lib" -lmp "${cuda_libraries[@]}")
    # Without optimisation: comm_pingpong has functions that return nothing where they should.
    compile=(-w -O0 "${cuda[@]}" -I "$repository/mp/capi/include" -I "$repository/gdsync/capi/include"
        -I "$repository/gdrcopy/capi/include")
    for program in mp_putget mp_sendrecv mp_sendrecv_stream; do
        mpicc.openmpi "${compile[@]}" "source/examples/$program.c" -o $program "${libraries[@]}" || return
    done
    program=source/comm_library/examples/comm_pingpong.cpp
    # By LibMP's layer for applications, and by ours: it includes "../comm.h".
    mpicxx.openmpi "${compile[@]}" "source/comm_library/comm.cpp" "$program" -o comm_pingpong "${libraries[@]}" || return
    mkdir -p ours/examples
    cp "$program" ours/examples
    cp "$repository/mp/capi/include/comm.h" ours
    mpicxx.openmpi "${compile[@]}" ours/examples/comm_pingpong.cpp -o comm_pingpong.ours "${libraries[@]}"
}

# ranks PATTERN COUNT PROGRAM VARIABLE=VALUE...: on the card, and on the software HCA. MPI itself uses neither.
ranks() {
    local pattern=$1 count=$2 program=$3 hca start
    shift 3
    other_link
    for hca in "$link" soft; do
        start=("$GDASYNC" card --link "$link")
        [ "$hca" != soft ] || start=(env GDSYNC_DEVICE=soft0)
        check "$program, $count ranks $* ($hca)" "$pattern" env "$@" LD_LIBRARY_PATH="$lib" timeout --kill-after=5 "$patience" \
            mpirun.openmpi --allow-run-as-root --oversubscribe --mca pml ob1 --mca btl ^openib -n "$count" \
            "${start[@]}" "./$program"
    done
}

programs() {
    local link=ib program count async
    c_libraries gdsync-mp-capi
    cuda
    source_of https://github.com/gpudirect/libmp b53e95b2a03ac4037c4bac2e879ec718256359b1 source
    check 'compile them' '' build
    ranks '^SendRecv test passed validation with message size: 65536' 2 mp_sendrecv
    ranks '^# SendRecv test passed validation with message size: 65536' 2 mp_sendrecv_stream
    for count in 0 1; do
        ranks '^test:Put-desc-nowait-on-stream message size:65536 +validation passed' 2 mp_putget USE_GPU_COMM_BUFFERS=$count
    done
    for program in comm_pingpong comm_pingpong.ours; do
        for count in 2 3; do
            for async in 0 1; do
                ranks "Procs: $count" $count $program COMM_USE_COMM=1 COMM_USE_ASYNC_SA=$async
            done
        done
    done
}
