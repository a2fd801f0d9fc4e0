# shellcheck shell=bash
# the tests of mp over rxe0; ping-pong and a stencil between two processes, also on the software HCA

# shellcheck disable=SC2034
timeout=900

host_build() {
    vm_cargo test --no-run -p gdsync-mp --test it
    vm_cargo build --workspace --example pingpong --example jacobi2d
}

guest_run() {
    # Ranks of one host would talk through the software HCA otherwise.
    export VM_STEP_TIMEOUT=480 GDSYNC_DEVICE=rxe0 MP_LOCAL=device GDSYNC_TEST_MAX_RANKS=3
    # Soft-RoCE returns another syndrome for longer messages.
    vm_test it launch:: messages:: on_stream:: credits:: --skip windows_on_stream --skip messages_longer
    # Not `shrink`, which takes too long here.
    vm_test it failures:: --skip longer_messages
    # What goes over the wire in a way of its own; the rest takes too long here.
    vm_test it windows::ranks_put windows::vectored windows::bytes_are_put_without windows::puts_of_a_dropped \
        windows::signals_come windows::gets_signal windows::signals_go windows::ranks_draw windows::compare_and_swap
    vm_test it windows_on_stream::streams_put windows_on_stream::prepared_operations_start_all \
        windows_on_stream::puts_and_gets windows_on_stream::ranks_that_cannot windows_on_stream::operations_on_dropped \
        windows_on_stream::given_up windows_on_stream::unreported windows_on_stream::waits_for windows_on_stream::dead_ranks
    local device
    # Many ranks of the software HCA on two emulated cores are too late for each other's timeouts.
    for device in rxe0 soft0; do
        export GDSYNC_DEVICE=$device
        vm_step "pingpong on $device" "$(vm_built pingpong)" --sizes 8,4096 --iters 200 --json /tmp/pingpong.json
        vm_step "jacobi2d on $device" "$(vm_built jacobi2d)" --nx 128 --ny 128 --ranks 2
        vm_step "jacobi2d by graphs on $device" "$(vm_built jacobi2d)" --nx 128 --ny 128 --ranks 2 --mode graph
    done
    export GDSYNC_DEVICE=rxe0 MP_LOCAL=soft
    vm_step "pingpong of one host beside rxe0" "$(vm_built pingpong)" --sizes 8,4096 --iters 200 --json /tmp/pingpong.json
}
