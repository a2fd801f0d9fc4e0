# shellcheck shell=bash
# our gdrdrv with a kernel that watches itself: KASAN, lockdep, every allocation failing once (VMKERNEL=debug)

# shellcheck source=tests/vm/suites/kmod.sh
. "${VM_REPOSITORY:?}/tests/vm/suites/kmod.sh"

# Both make a boot last minutes on a machine that does other things too.
export VMAPPEND=${VMAPPEND:-no_debug_objects kmemleak=off}

host_build() {
    # shellcheck disable=SC2154 # the runner's
    [ "$kernel_name" = debug ] || fail "suite kmod_debug wants VMKERNEL=debug"
    vm_cargo test --no-run -p gdrcopy --lib --test pin_stress
    vm_build_module "$VM_REPOSITORY/kmod" GDR_TESTS=m
}

# Those of the calling task that ask for it (fail-nth), whatever they allocate.
failing_allocations() {
    echo N >/sys/kernel/debug/failslab/ignore-gfp-wait
    load gdr_provider
    of gdrdrv::tests::kmod::nth --nocapture
    load gdr_provider use_persistent_mapping=0
    of gdrdrv::tests::kmod::nth --nocapture
    unload
}

guest_run() {
    export VM_STEP_TIMEOUT=${VM_STEP_TIMEOUT:-900}
    # A failure that was asked for is not told with a trace.
    echo 0 | tee /sys/kernel/debug/{failslab,fail_usercopy,fail_page_alloc}/verbose
    vm_step "persistent pins" raw_tests gdrdrv::tests::kmod gdr_provider
    vm_step "volatile pins" raw_tests gdrdrv::tests::kmod gdr_provider use_persistent_mapping=0
    vm_step "the crate" crate_tests
    vm_step "every allocation fails once" failing_allocations
    vm_step "loading and unloading" life
    vm_step "a fuzzer" fuzz 60
    vm_step "lockdep is still on" grep -qE 'debug_locks: +1' /proc/lockdep_stats
}
