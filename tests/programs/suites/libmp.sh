# shellcheck shell=bash
# LibMP's programs without kernels, unmodified, over libmp.so.2 and a simulated GPU, on the card and on the software HCA

# shellcheck disable=SC2034
packages=(
    mpirun.openmpi:openmpi-bin mpicxx.openmpi:libopenmpi-dev g++:g++ git:git python3:python3
    /etc/libibverbs.d/mlx5.driver:ibverbs-providers
)
# A checkout of LibMP, and a folder with cuda_runtime.h; else both are fetched.
: "${LIBMP:=}" "${CUDA_INCLUDE:=}"
pinned=b53e95b2a03ac4037c4bac2e879ec718256359b1
cuda=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88)
patience=${PATIENCE:-400}
kept=$target/libmp

# fetch: LibMP's source and CUDA's headers, once.
fetch() {
    mkdir -p "$kept"
    if [ -z "$LIBMP" ]; then
        LIBMP=$kept/source
        if [ ! -e "$LIBMP/examples" ]; then
            git init -q "$LIBMP" &&
                timeout 300 git -C "$LIBMP" fetch -q --depth 1 https://github.com/gpudirect/libmp $pinned &&
                git -C "$LIBMP" checkout -q FETCH_HEAD || return
        fi
    fi
    if [ -z "$CUDA_INCLUDE" ]; then
        CUDA_INCLUDE=$kept/nvidia/cu13/include
        if [ ! -e "$CUDA_INCLUDE/crt/host_config.h" ]; then
            (cd "$kept" && timeout 300 python3 -m pip download -q --no-deps "${cuda[@]}" &&
                for wheel in *.whl; do python3 -m zipfile -e "$wheel" .; done) || return
        fi
    fi
}

# The libraries under the names that programs look for, and the programs.
build() {
    local library compile program
    (cd "$repository" && timeout 1800 cargo build --quiet -p gdsync-mp-capi -p gdsync-simulated-cuda --lib) || return
    for library in mp:libmp_c.so cuda:libsimulated_cuda.so; do
        ln -s "$target/debug/${library#*:}" "lib${library%:*}.so"
    done
    ln -s libmp.so libmp.so.2
    ln -s libcuda.so libcuda.so.1
    gcc -shared -fPIC -O1 -Wall -I "$CUDA_INCLUDE" "$here/suites/cudart.c" -o libcudart.so -L. -lcuda || return
    # Without optimisation: comm_pingpong has functions that return nothing where they should.
    compile=(-w -O0 -I "$CUDA_INCLUDE" -I "$repository/mp/capi/include" -I "$repository/gdsync/capi/include"
        -I "$repository/gdrcopy/capi/include")
    for program in mp_putget mp_sendrecv mp_sendrecv_stream; do
        mpicc.openmpi "${compile[@]}" "$LIBMP/examples/$program.c" -o $program -L. -lmp -lcudart -lcuda || return
    done
    program=$LIBMP/comm_library/examples/comm_pingpong.cpp
    # By LibMP's layer for applications, and by ours: it includes "../comm.h".
    mpicxx.openmpi "${compile[@]}" "$LIBMP/comm_library/comm.cpp" "$program" -o comm_pingpong -L. -lmp -lcudart -lcuda || return
    mkdir -p ours/examples
    cp "$program" ours/examples
    cp "$repository/mp/capi/include/comm.h" ours
    mpicxx.openmpi "${compile[@]}" ours/examples/comm_pingpong.cpp -o comm_pingpong.ours -L. -lmp -lcudart -lcuda
}

# ranks PATTERN COUNT PROGRAM VARIABLE=VALUE...: on the card, and on the software HCA. MPI itself uses neither.
ranks() {
    local pattern=$1 count=$2 program=$3 hca start
    shift 3
    other_link
    for hca in "$link" soft; do
        start=("$GDASYNC" card --link "$link")
        [ "$hca" != soft ] || start=(env GDSYNC_DEVICE=soft0)
        check "$program, $count ranks $* ($hca)" "$pattern" env "$@" LD_LIBRARY_PATH="$PWD" timeout --kill-after=5 "$patience" \
            mpirun.openmpi --allow-run-as-root --oversubscribe --mca pml ob1 --mca btl ^openib -n "$count" \
            "${start[@]}" "./$program"
    done
}

programs() {
    local link=ib program count async
    if [ -n "$release" ]; then
        echo "they run with what is installed"
        return
    fi
    fetch >fetch.log 2>&1 || { echo "skipped: cannot fetch LibMP or CUDA's headers; set LIBMP and CUDA_INCLUDE" && exit 77; }
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
