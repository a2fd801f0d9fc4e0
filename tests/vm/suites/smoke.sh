# shellcheck shell=bash
# the devices exist and the kernel's own tools move data over rxe0

host_build() { :; }

# pair READY SERVER CLIENT: runs two commands at the same time, the second when READY matches what listens; both must succeed.
pair() {
    local server
    $2 &
    server=$!
    for ((try = 0; try < 100; try++)); do
        { ss -Htln && rdma resource show cm_id; } | grep -q "$1" && break
        sleep 0.1
    done
    $3
    wait "$server"
}

guest_run() {
    vm_step "rxe0 is active" grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
    vm_step "libibverbs opens rxe0" ibv_devinfo -d rxe0
    local pingpong="ibv_rc_pingpong -d rxe0 -g 1 -n 200" rping="rping -a 10.9.0.1 -C 50 -V"
    vm_step "ibv_rc_pingpong" pair :18515 "$pingpong" "$pingpong 10.9.0.1"
    vm_step "rping (rdma_cm)" pair LISTEN "$rping -s" "$rping -c"
}
