# shellcheck shell=bash
# perftest: latency and bandwidth of write, read, send (RC, UD, SRQ) and atomics

# shellcheck disable=SC2034
packages=(ib_write_bw:perftest /etc/libibverbs.d/mlx5.driver:ibverbs-providers)

programs() {
    local link=ib line client=()
    if ((brief)); then
        pair eth '^ *[0-9]+ +48 +[0-9.]+ ' ib_write_bw --post_list 8 -n 48
        pair ib '^ *[0-9]+ +48 +[0-9.]+ ' ib_send_bw -e -n 48
        pair eth '^ *[0-9]+ +48 +[0-9.]+ ' ib_atomic_bw -n 48
        return
    fi
    while read -r line; do
        other_link
        # The row of results: bytes, iterations (of all queue pairs), figures. --post_list wants a multiple of 8.
        # shellcheck disable=SC2086
        pair "$link" '^ *[0-9]+ +(48|192) +[0-9.]+ ' $line -n 48
    done <<'END'
ib_write_lat
ib_write_lat -s 4096 -I 0
ib_write_bw
ib_write_bw -q 4 --post_list 8
ib_write_bw -b
ib_read_lat
ib_read_bw
ib_send_lat
ib_send_lat -c UD
ib_send_bw
ib_send_bw -e
ib_send_bw --use-srq
ib_atomic_lat
ib_atomic_bw -A CMP_AND_SWAP
END
    faults
}

# Packets are lost, doubled, late and reordered: the HCA sends them again, and a program sees nothing of it.
faults() {
    local link=ib label="faults, " client=()
    local -x GDSYNC_FAULTS=seed=1,drop=0.02,duplicate=0.02,delay=0.02:200,reorder=0.02
    pair "$link" '^ *[0-9]+ +48 +[0-9.]+ ' ib_write_bw -n 48
    pair "$link" '^ *[0-9]+ +48 +[0-9.]+ ' ib_send_lat -n 48
}
