# shellcheck shell=bash
# gdsync's tests of verbs, streams and graphs over rxe0

# shellcheck disable=SC2034
timeout=900

# The kernel looks whether what writes to its memory stays within its own: what does not is told, and crashes nothing else later.
export VMAPPEND=${VMAPPEND:-slub_debug=FZP,kmalloc-*}

host_build() {
    vm_cargo test --no-run -p gdsync --test it
}

guest_run() {
    export VM_STEP_TIMEOUT=240
    vm_test it verbs::
    # The emulated guest is slow.
    export GDSYNC_TEST_DEVICE=rxe0 GDSYNC_TEST_TIER=fast
    vm_test it devices::
    vm_test it verbs_device:: --skip port_that_goes_down # suite faults has it
    vm_test it verbs_cycles::
    vm_test it interop:: # with ibv_rc_pingpong
    vm_test it verbs:: --skip dma_bufs # Soft-RoCE takes none
    # Left out: what wants the exact code of a wrong key, the software HCA's counters, or very many messages.
    vm_test it queues:: --skip receive_that_was_half_filled
    vm_test it streams:: --skip root_cause_is_what_happened_first
    vm_test it prepared:: --skip streams_alone_keep_the_queues_going
    vm_test it graphs::
    vm_test it batch_run::
}
