# shellcheck shell=bash
# what breaks below a running program: the link, a peer, the limit of locked memory

host_build() {
    vm_cargo test --no-run -p gdsync --test it
    vm_cargo build --workspace --example pingpong --example sendrecv
}

# Starts a long ping-pong over rxe0, calls "$@" when messages pass, and wants both ranks gone with an error soon.
disturbed() {
    local game status=0
    "$(vm_built pingpong)" --sizes 8 --modes stream --iters 1000000 >/tmp/game 2>&1 &
    game=$!
    until_messages_pass
    "$@"
    timeout 60 tail --pid="$game" -f /dev/null || { echo "still running after a minute" && return 1; }
    wait "$game" || status=$?
    cat /tmp/game
    ((status != 0)) || { echo "the failure was not told" && return 1; }
    ! pgrep -x pingpong || { echo "a rank was left behind" && return 1; }
}

# The counter of packets rises.
until_messages_pass() {
    local try packets=/sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts first
    first=$(<"$packets")
    for ((try = 0; try < 300; try++)); do
        (($(<"$packets") > first + 100)) && return
        sleep 0.1
    done
    cat /tmp/game
    echo "no messages passed" && return 1
}

link_down() { ip link set dummy0 down; }
kill_one() { pkill -9 -n -x pingpong; }

works_again() {
    ip link set dummy0 up
    local try
    for ((try = 0; try < 100; try++)); do
        grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state && break
        sleep 0.1
    done
    "$(vm_built pingpong)" --sizes 8 --modes stream --iters 100
}

# As an ordinary user who may lock 4 KiB.
too_little_memory() {
    local said
    chmod 666 /dev/infiniband/uverbs0
    if said=$(ulimit -l 4 && setpriv --reuid=65534 --regid=65534 --clear-groups "$(vm_built sendrecv)" 2>&1); then
        echo "$said: memory beyond the limit was locked" && return 1
    fi
    echo "$said"
    grep -qiE 'memlock|ulimit' <<<"$said"
}

guest_run() {
    # Ranks of one host would talk through the software HCA otherwise.
    export GDSYNC_DEVICE=rxe0 GDSYNC_TEST_DEVICE=rxe0 GDSYNC_TEST_NETDEV=dummy0 MP_LOCAL=device
    vm_test it --exact verbs_device::port_that_goes_down_breaks_its_queue_pairs
    vm_test it --exact verbs_device::killed_peer_ends_sends_with_a_retry_error
    vm_step "the link goes down under two ranks" disturbed link_down
    vm_step "messages pass again" works_again
    vm_step "a rank is killed" disturbed kill_one
    vm_step "messages pass again" works_again
    vm_step "too little memory may be locked" too_little_memory
}
