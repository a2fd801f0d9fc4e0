# shellcheck shell=bash
# OSU micro-benchmarks over Open MPI and MPICH over UCX, two and four ranks, which compare what arrives

# shellcheck disable=SC2034
packages=(
    mpirun.openmpi:openmpi-bin mpicc.openmpi:libopenmpi-dev mpirun.mpich:mpich mpicc.mpich:libmpich-dev gcc:gcc make:make git:git
    "/usr/lib/*/ucx/libuct_ib.so.0:libucx0" /etc/libibverbs.d/mlx5.driver:ibverbs-providers
)

# Processes of MPICH that poll wait for each other a slice of time.
patience=${PATIENCE:-600}

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
    local implementation link=eth tls generated
    # No package has them. Version 7.4 as it was released.
    source_of https://github.com/sherrywong1220/osu-micro-benchmarks-7.4 bed60f564c2908a6123315f49f6dd0c0ff5440a3 source
    # Git keeps no time stamps: these are newer than what they are made of, or make would run automake, with another libtool.
    for generated in aclocal.m4 configure '*.in'; do
        find source -name "$generated" -exec touch {} +
    done
    for implementation in openmpi mpich; do
        mkdir "$implementation"
        check "builds with $implementation" '' timeout 600 bash -ec '
            cd "$1" && ../source/configure CC="mpicc.$1" CXX="mpicxx.$1"
            make -C c/mpi/pt2pt/standard osu_latency osu_bw && make -C c/mpi/collective/blocking osu_allreduce
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
