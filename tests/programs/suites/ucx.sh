# shellcheck shell=bash
# UCX: ucx_info, ucx_perftest by verbs and by UCX's own mlx5 code

# shellcheck disable=SC2034
packages=(ucx_perftest:ucx-utils "/usr/lib/*/ucx/libuct_ib.so.0:libucx0" /etc/libibverbs.d/mlx5.driver:ibverbs-providers)

# perftest LINK PATTERN: two processes with the arguments `client`. Some releases build ucx_perftest to be started by MPI.
perftest() {
    local link=$1 mpi=(mpirun.openmpi --allow-run-as-root --oversubscribe -n 2 --mca pml ucx --mca btl self)
    # Not by a pipe: with `pipefail`, ldd's SIGPIPE at grep's early end would count as no match.
    if ! grep -q libmpi <(ldd "$(command -v ucx_perftest)"); then
        pair "$link" "$2" ucx_perftest
        return
    fi
    need mpirun.openmpi:openmpi-bin || { failed=$((failed + 1)) && return; }
    check "ucx_perftest ${client[*]} (${label:-}$link)" "$2" timeout --kill-after=5 "$patience" \
        "${mpi[@]}" "$GDASYNC" card --link "$link" ucx_perftest "${client[@]}"
}

programs() {
    local link test client label transport
    local -x UCX_TLS UCX_NET_DEVICES=mlx5_0:1
    if ((brief)); then
        client=(-t tag_lat -n 50 -w 5)
        UCX_TLS=rc_verbs,ud_verbs perftest ib 'Final: +50 '
        UCX_TLS=rc_mlx5,ud_mlx5 perftest eth 'Final: +50 '
        return
    fi
    for link in eth ib; do
        for transport in rc_verbs ud_verbs rc_mlx5 ud_mlx5; do
            UCX_TLS=all UCX_NET_DEVICES=all \
                check "ucx_info -d has $transport ($link)" "Transport: $transport" card "$link" ucx_info -d
        done
    done
    for UCX_TLS in rc_verbs,ud_verbs rc_mlx5,ud_mlx5; do
        label="$UCX_TLS, "
        for test in tag_lat tag_bw ucp_am_lat ucp_am_bw ucp_put_lat ucp_put_bw ucp_get ucp_fadd ucp_cswap; do
            other_link
            client=(-t "$test" -n 100 -w 5)
            perftest "$link" 'Final: +100 '
        done
        # A rendezvous, by READ.
        client=(-t tag_bw -n 50 -w 5 -s 262144)
        perftest "$link" 'Final: +50 '
    done
    # The transports alone, without UCP.
    label=
    for transport in rc_verbs ud_verbs rc_mlx5 ud_mlx5; do
        other_link
        client=(-t am_lat -d mlx5_0:1 -x "$transport" -n 100 -w 5)
        perftest "$link" 'Final: +100 '
    done
}
