# shellcheck shell=bash
# Open MPI and MPICH over UCX, two and four ranks: exchange.c checks what arrives

# shellcheck disable=SC2034
packages=(
    mpirun.openmpi:openmpi-bin mpicc.openmpi:libopenmpi-dev mpirun.mpich:mpich mpicc.mpich:libmpich-dev
    gcc:gcc "/usr/lib/*/ucx/libuct_ib.so.0:libucx0" /etc/libibverbs.d/mlx5.driver:ibverbs-providers
)

# UCX logs the transport of each endpoint: a run by shared memory or TCP would prove nothing.
runs() {
    local link=$1 tls=$2 implementation=$3 ranks=$4
    local name="$implementation, $ranks ranks, UCX_TLS=$tls ($link)"
    local -x UCX_TLS=$tls,self UCX_NET_DEVICES=mlx5_0:1 UCX_LOG_LEVEL=info UCX_LOG_FILE=ucx-%p.log
    rm -f ucx-*.log
    local start=(mpirun.mpich -n "$ranks")
    [ "$implementation" = mpich ] || start=(mpirun.openmpi --allow-run-as-root --oversubscribe -n "$ranks"
        --mca pml ucx --mca osc ucx --mca btl self -x UCX_TLS -x UCX_NET_DEVICES -x UCX_LOG_LEVEL -x UCX_LOG_FILE)
    check "$name" "^exchange: $ranks ranks, all data right" timeout --kill-after=5 "$patience" \
        "${start[@]}" "$GDASYNC" card --link "$link" "./exchange.$implementation"
    check "$name: by this transport" "${tls%%,*}/mlx5_0" cat ucx-*.log
}

programs() {
    local implementation link tls
    for implementation in openmpi mpich; do
        check "mpicc.$implementation exchange.c" '' \
            timeout 60 "mpicc.$implementation" -O2 -Wall -o "exchange.$implementation" "$here/suites/exchange.c"
        if ((brief)); then
            runs eth rc_mlx5,ud_mlx5 $implementation 2
            continue
        fi
        for link in eth ib; do
            for tls in rc_verbs,ud_verbs rc_mlx5,ud_mlx5; do
                runs "$link" $tls $implementation 2
            done
        done
        runs eth rc_mlx5,ud_mlx5 $implementation 4
        runs ib rc_verbs,ud_verbs $implementation 4
    done
}
