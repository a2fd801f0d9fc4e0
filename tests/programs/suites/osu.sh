# shellcheck shell=bash
# OSU micro-benchmarks over Open MPI and MPICH over UCX, two and four ranks, which compare what arrives; OSU_SOURCE is their source

# shellcheck disable=SC2034
packages=(
    mpirun.openmpi:openmpi-bin mpicc.openmpi:libopenmpi-dev mpirun.mpich:mpich mpicc.mpich:libmpich-dev gcc:gcc make:make
    "/usr/lib/*/ucx/libuct_ib.so.0:libucx0" /etc/libibverbs.d/mlx5.driver:ibverbs-providers
)

# No package has them: https://mvapich.cse.ohio-state.edu/benchmarks/ (a checkout needs `autoreconf -fi` first)
if ! [ -x "${OSU_SOURCE:-}/configure" ]; then
    echo "== osu"
    echo "skipped: OSU_SOURCE names no folder with the source of the OSU micro-benchmarks (7.4)"
    exit 77
fi

# runs IMPLEMENTATION LINK RANKS BENCHMARK ARGUMENT...
runs() {
    local implementation=$1 link=$2 ranks=$3 benchmark=$4
    shift 4
    local -x UCX_TLS=$tls,self UCX_NET_DEVICES=mlx5_0:1
    local start=(mpirun.mpich -n "$ranks")
    [ "$implementation" = mpich ] || start=(mpirun.openmpi --allow-run-as-root --oversubscribe -n "$ranks"
        --mca pml ucx --mca osc ucx --mca btl self -x UCX_TLS -x UCX_NET_DEVICES)
    check "$benchmark, $implementation, $ranks ranks, UCX_TLS=$tls ($link)" 'Pass$' timeout --kill-after=5 "$patience" \
        "${start[@]}" "$GDASYNC" card --link "$link" "$(find "$implementation" -name "$benchmark" -type f)" -c "$@"
}

programs() {
    local implementation link=eth tls
    for implementation in openmpi mpich; do
        mkdir "$implementation"
        check "builds with $implementation" '' timeout 600 bash -ec '
            cd "$1" && "$OSU_SOURCE/configure" CC="mpicc.$1" CXX="mpicxx.$1"
            make -C c/mpi/pt2pt/standard && make -C c/mpi/collective/blocking
        ' - "$implementation"
        for tls in rc_mlx5,ud_mlx5 rc_verbs,ud_verbs; do
            other_link
            runs "$implementation" "$link" 2 osu_latency -i 20 -x 2 -m 0:65536
            runs "$implementation" "$link" 2 osu_bw -i 5 -x 1 -m 1:65536
            # Not of bytes: Open MPI 4.1 adds them with saturation where the CPU has AVX, which OSU takes for wrong data.
            runs "$implementation" "$link" 2 osu_allreduce -T mpi_int -i 5 -x 1 -m 4:16384
        done
        # Four ranks that poll take long on few cores.
        tls=rc_mlx5,ud_mlx5
        runs "$implementation" eth 4 osu_allreduce -T mpi_int -i 2 -x 0 -m 4:64
    done
}
