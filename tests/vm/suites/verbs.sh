# shellcheck shell=bash
# gdsync's tests of verbs, streams and graphs over rxe0

# shellcheck disable=SC2034
timeout=900

# The kernel looks whether what writes to its memory stays within its own: what does not is told, and crashes nothing else later.
export VMAPPEND=${VMAPPEND:-slub_debug=FZP,kmalloc-*}

host_build() {
    vm_cargo test --no-run --workspace --test devices --test verbs_device --test verbs_cycles --test interop --test verbs \
        --test queues --test streams --test stream_queues --test graphs --test batch_run
}

guest_run() {
    export VM_STEP_TIMEOUT=240
    vm_test verbs
    export GDSYNC_TEST_DEVICE=rxe0
    vm_test devices
    vm_test verbs_device --skip a_port_that_goes_down # suite faults has it
    GDSYNC_TEST_CYCLES=1 vm_test verbs_cycles
    vm_test interop # with ibv_rc_pingpong
    vm_test verbs
    # Left out: what wants the exact code of a wrong key, the software HCA's counters, or 100,000 messages.
    vm_test queues --skip a_receive_that_was_half_filled
    vm_test streams --skip the_root_cause_is_what_happened_first
    vm_test stream_queues --skip streams_alone_keep_the_queues_going
    GDSYNC_TEST_REPLAYS=200 vm_test graphs
    vm_test batch_run
}
