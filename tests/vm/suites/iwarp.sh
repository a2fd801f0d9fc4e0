# shellcheck shell=bash
# gdsync's queue pairs over siw0 (soft iWARP), whose connections librdmacm makes; ping-pong between two processes there

# shellcheck disable=SC2034
devices=(siw0) timeout=600

host_build() {
    vm_cargo test --no-run -p gdsync --test it
    vm_cargo build --workspace --example pingpong
}

nothing_is_left() {
    local held
    held=$(rdma resource show)
    echo "$held"
    grep -q 'siw0: pd 0 cq 0 qp 0 cm_id 0 mr 0' <<<"$held"
}

guest_run() {
    export VM_STEP_TIMEOUT=240 GDSYNC_TEST_IWARP=siw0 GDSYNC_DEVICE=siw0
    vm_test it verbs_iwarp::
    vm_step "pingpong on siw0" "$(vm_built pingpong)" --sizes 8,4096 --iters 100
    vm_step "nothing is left in the kernel" nothing_is_left
}
