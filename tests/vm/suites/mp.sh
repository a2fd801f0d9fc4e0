# shellcheck shell=bash
# the tests of mp, ping-pong and a stencil between two processes, on the software HCA and over rxe0

# shellcheck disable=SC2034
timeout=600

host_build() {
    vm_cargo test --no-run --workspace --test bootstrap --test spawn --test failures --test messages --test on_stream
    vm_cargo build --workspace --example pingpong --example jacobi2d
}

guest_run() {
    local device
    export VM_STEP_TIMEOUT=240
    vm_test bootstrap
    vm_test spawn
    # Soft-RoCE has another code for it.
    GDSYNC_DEVICE=rxe0 vm_test failures --skip a_message_longer_than_the_receive
    for device in soft0 rxe0; do
        export GDSYNC_DEVICE=$device
        vm_test messages
        vm_test on_stream
        vm_step "pingpong on $device" "$(vm_built pingpong)" --sizes 8,4096 --iters 200 --json /tmp/pingpong.json
        vm_step "jacobi2d on $device" "$(vm_built jacobi2d)" --nx 128 --ny 128 --ranks 2
    done
}
