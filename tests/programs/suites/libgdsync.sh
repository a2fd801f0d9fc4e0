# shellcheck shell=bash
# libgdsync's own tests (pull request 107): on a GPU unmodified, or their transfers alone over the simulated CUDA driver

# shellcheck disable=SC2034
packages=(gcc:gcc g++:g++ git:git mpicc:libopenmpi-dev mpirun:openmpi-bin /usr/include/infiniband/verbs.h:libibverbs-dev
    /etc/libibverbs.d/mlx5.driver:ibverbs-providers)

# shellcheck source=tests/programs/cuda.sh
. "$here/cuda.sh"

build() {
    local flags=(-O2 -w -D_GNU_SOURCE -I . -I "$repository/gdsync/capi/include" -I "$repository/gdrcopy/capi/include" "${cuda[@]}")
    local libraries=(-L "$lib" -lgdsync -lgdrapi -libverbs "${cuda_libraries[@]}" -lpthread) source name
    # Their configure would make it.
    echo >config.h
    for source in pingpong.c gds_poll_lat.c gds_kernel_loopback_latency.c; do
        gcc "${flags[@]}" -c "source/tests/$source" -o "$(basename "$source" .c).o"
    done
    mpicc "${flags[@]}" -c source/tests/gds_kernel_latency.c -o gds_kernel_latency.o
    for source in gpu gds_sanity; do
        g++ "${flags[@]}" -c "source/tests/$source.cpp" -o "$source.o"
    done
    if ((has_gpu)); then
        nvcc -O2 -arch=native "${flags[@]:3}" -c source/tests/gpu_kernels.cu -o kernels.o
    else
        g++ "${flags[@]}" -c "$here/suites/cuda/libgdsync_kernels.cpp" -o kernels.o
    fi
    for name in gds_sanity gds_poll_lat gds_kernel_loopback_latency; do
        g++ -o $name $name.o gpu.o kernels.o pingpong.o "${libraries[@]}"
    done
    mpicc -o gds_kernel_latency gds_kernel_latency.o gpu.o kernels.o pingpong.o "${libraries[@]}" -lstdc++
}

# Two ranks.
ranks() {
    local root=()
    ! grep -q 'Open MPI' <(mpirun --version) || root=(--allow-run-as-root --oversubscribe)
    timeout --kill-after=5 "$patience" mpirun "${root[@]}" -n 2 "$GDASYNC" card --link ib "$@"
}

programs() {
    local options iterations=100 sanity_iterations=20
    local sanity=('' -f -m -N) poll_lat=('' '-c -P 4' '-p 4' '-w -m')
    c_libraries gdrapi gdsync-capi
    cuda
    source_of https://github.com/gpudirect/libgdsync f4506e0cba6ecc30ffb6972029fe9b2fae93f867 source
    # These two give a stream 1 ms, which is enough for a GPU. A thread of the simulated driver has to wait for a core, 100 ms and
    # more where others are busy. Each iteration of gds_sanity waits as long as the limit.
    ((has_gpu)) || sed -i 's/tmout = 1000;/tmout = 1000000;/' source/tests/gds_{sanity.cpp,poll_lat.c}
    check 'build' '' build
    ((failed == 0)) || return 0
    # They wait for ever.
    local -x LD_LIBRARY_PATH=$lib GDSYNC_CAPI_WAIT_LIMIT=100
    # -g takes memory of the GPU, which the simulated one has not mapped for the CPU.
    ! ((has_gpu)) || iterations=1000 sanity_iterations=1000 sanity+=(-g '-f -g -m') poll_lat+=(-g '-g -f')
    for options in "${sanity[@]}"; do
        # shellcheck disable=SC2086
        check "gds_sanity $options" '>>> SUCCESS' timeout "$patience" ./gds_sanity -n $sanity_iterations $options
    done
    for options in "${poll_lat[@]}"; do
        # shellcheck disable=SC2086
        check "gds_poll_lat $options" 'average wait time: [0-9.]+us' timeout "$patience" ./gds_poll_lat -n $iterations $options
    done
    # -U takes prepared descriptors, -P -U has them posted by a callback of the stream, -E has payload in GPU memory.
    for options in '' -U '-P -U' -E '-C -D 1' -K; do
        # shellcheck disable=SC2086
        check "gds_kernel_loopback_latency $options" "$iterations iters in .* usec/iter" \
            card ib ./gds_kernel_loopback_latency -n $iterations $options
    done
    for options in '' -U '-P -U' -E '-k 2' '-k 2 -U' '-k 2 -P -U' '-k 2 -E' '-k 2 -C -D 1' '-k 2 -T -K'; do
        # shellcheck disable=SC2086
        check "gds_kernel_latency $options" "\[1\] $iterations iters in .* usec/iter" \
            ranks ./gds_kernel_latency -n $iterations $options
    done
}
