# shellcheck shell=bash
# our gdrdrv with a kernel that watches itself: KASAN, lockdep, kmemleak, every allocation failing once (VMKERNEL=debug)

# shellcheck source=tests/vm/suites/kmod.sh
. "${VM_REPOSITORY:?}/tests/vm/suites/kmod.sh"

host_build() {
    [ "$kernel_name" = debug ] || fail "suite kmod_debug wants VMKERNEL=debug"
    vm_cargo test --no-run -p gdrcopy --lib --test pin_stress
    vm_build_module "$VM_REPOSITORY/kmod" GDR_TESTS=m
}

# Those of the calling task that ask for it (fail-nth), whatever they allocate.
failing_allocations() {
    local attribute=/sys/kernel/debug
    echo N >$attribute/failslab/ignore-gfp-wait
    echo 0 >$attribute/failslab/verbose
    echo 0 >$attribute/fail_usercopy/verbose
    load gdr_provider
    of gdrdrv::tests::kmod::nth --nocapture
    load gdr_provider use_persistent_mapping=0
    of gdrdrv::tests::kmod::nth --nocapture
    unload
}

# What nobody refers to any more. The first scan is of what others left.
leaks() {
    echo scan >/sys/kernel/debug/kmemleak
    sleep 6 # younger objects are not reported
    echo scan >/sys/kernel/debug/kmemleak
    ! grep -A20 -E 'gdr_|nvidia_p2p|provider' /sys/kernel/debug/kmemleak
}

guest_run() {
    export VM_STEP_TIMEOUT=900
    grep -q . /proc/lockdep_stats
    vm_step "persistent pins" raw_tests gdrdrv::tests::kmod gdr_provider
    vm_step "volatile pins" raw_tests gdrdrv::tests::kmod gdr_provider use_persistent_mapping=0
    vm_step "the crate" crate_tests
    vm_step "every allocation fails once" failing_allocations
    vm_step "loading and unloading" life
    vm_step "a fuzzer" fuzz 60
    vm_step "no leak" leaks
    vm_step "lockdep is still on" grep -qE 'debug_locks: +1' /proc/lockdep_stats
}
