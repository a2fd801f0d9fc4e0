# shellcheck shell=bash
# the tests of mp, and the ping-pong between two processes

host_build() {
    vm_cargo test --no-run --workspace --test bootstrap --test failures --test lifetimes --test messages --test on_stream --test spawn
    vm_cargo build --workspace --example pingpong
}

guest_run() {
    vm_tests
    vm_step "pingpong" "$(vm_built pingpong)" --sizes 8,4096 --iters 500 --json /tmp/pingpong.json
}
