# shellcheck shell=bash
# rdma-core's ibv_devinfo and ping-pongs (RC, UD, SRQ)

# shellcheck disable=SC2034
packages=(ibv_devinfo:ibverbs-utils /etc/libibverbs.d/mlx5.driver:ibverbs-providers)

programs() {
    local link program options client=()
    if ((brief)); then
        check "ibv_devinfo -v" 'hca_id:.mlx5_0' card eth ibv_devinfo -v
        pair eth '50 iters in' ibv_rc_pingpong -c -n 50 -g 1
        pair ib '50 iters in' ibv_ud_pingpong -c -n 50 -e
        pair eth '50 iters in' ibv_srq_pingpong -c -n 50 -g 3 -e
        return
    fi
    for link in eth ib; do
        check "ibv_devinfo -v ($link)" 'hca_id:.mlx5_0' card "$link" ibv_devinfo -v
    done
    check "ibv_devinfo, two devices" 'hca_id:.mlx5_1' \
        timeout "$patience" "$GDASYNC" card --devices 2 ibv_devinfo
    for program in ibv_rc_pingpong ibv_ud_pingpong ibv_srq_pingpong; do
        # -c compares what arrived; `-g 1` is RoCE v2, by a link-local address and by one of IPv4.
        for options in "eth -g 1" "eth -g 3 -e" "ib" "ib -e"; do
            read -r link options <<<"$options"
            # shellcheck disable=SC2086
            pair "$link" '100 iters in' "$program" -c -n 100 $options
        done
    done
    # A completion fails as if the peer were gone.
    label="failed completion, " ends=1 GDSYNC_FAULTS=fail-send=15@10 \
        pair ib 'Failed status transport retry counter exceeded' ibv_rc_pingpong -n 100
}
