# shellcheck shell=bash
# the tests of mp over rxe0; ping-pong and a stencil between two processes, also on the software HCA

# shellcheck disable=SC2034
timeout=900

host_build() {
    vm_cargo test --no-run --workspace --test bootstrap --test spawn --test failures --test messages --test on_stream --test credits \
        --test windows --test windows_signals --test windows_on_stream --test windows_failures
    vm_cargo build --workspace --example pingpong --example jacobi2d
}

guest_run() {
    # Ranks of one host would talk through the software HCA otherwise.
    export VM_STEP_TIMEOUT=240 GDSYNC_DEVICE=rxe0 MP_LOCAL=device
    vm_test bootstrap
    vm_test spawn
    # Soft-RoCE has another code for it.
    vm_test failures --skip a_message_longer_than_the_receive
    vm_test messages
    vm_test on_stream
    vm_test credits
    # What goes over the wire in a way of its own; the rest takes too long here.
    vm_test windows two_ranks pieces bytes_are_put_without dropped_window
    vm_test windows_signals a_signal_comes a_get_signals window_beside two_ranks compare_and_swap
    vm_test windows_on_stream two_ranks at_once wait_for_their_stream
    vm_test windows_failures
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
