# shellcheck shell=bash
# the tests of mp, and the ping-pong between two processes

host_build() {
    vm_cargo test --no-run -p gdsync-mp --tests
    vm_cargo build --example pingpong
}

guest_run() {
    vm_tests
    vm_step "pingpong" "$(vm_built pingpong)" --sizes 8,4096 --json /tmp/pingpong.json
}
