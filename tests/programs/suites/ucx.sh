# shellcheck shell=bash
# UCX: ucx_info, ucx_perftest by verbs and by UCX's own mlx5 code

# shellcheck disable=SC2034
packages=(ucx_perftest:ucx-utils /etc/libibverbs.d/mlx5.driver:ibverbs-providers)

programs() {
    local link test client label transport
    local -x UCX_TLS UCX_NET_DEVICES=mlx5_0:1
    if ((brief)); then
        client=(-t tag_lat -n 50 -w 5)
        UCX_TLS=rc_verbs,ud_verbs pair ib 'Final: +50 ' ucx_perftest
        UCX_TLS=rc_mlx5,ud_mlx5 pair eth 'Final: +50 ' ucx_perftest
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
            pair "$link" 'Final: +100 ' ucx_perftest
        done
        # A rendezvous, by READ.
        client=(-t tag_bw -n 50 -w 5 -s 262144)
        pair "$link" 'Final: +50 ' ucx_perftest
    done
    # The transports alone, without UCP.
    label=
    for transport in rc_verbs ud_verbs rc_mlx5 ud_mlx5; do
        other_link
        client=(-t am_lat -d mlx5_0:1 -x "$transport" -n 100 -w 5)
        pair "$link" 'Final: +100 ' ucx_perftest
    done
}
