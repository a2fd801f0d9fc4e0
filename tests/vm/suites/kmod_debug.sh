# shellcheck shell=bash
# our gdrdrv with a kernel that watches itself: KASAN, lockdep, kmemleak, every allocation failing once (VMKERNEL=debug)

# shellcheck source=tests/vm/suites/kmod.sh
. "${VM_REPOSITORY:?}/tests/vm/suites/kmod.sh"

# Debug objects make a boot last minutes. With kmemleak ACPI gives up routing interrupts, which takes it more than 30 s of loops; and
# on a busy machine RCU takes the boot for stalled.
export VMAPPEND=${VMAPPEND:-no_debug_objects pci=noacpi rcupdate.rcu_cpu_stall_timeout=300}

host_build() {
    # shellcheck disable=SC2154 # the runner's
    [ "$kernel_name" = debug ] || fail "suite kmod_debug wants VMKERNEL=debug"
    vm_cargo test --no-run -p gdrcopy --test it
    vm_build_module "$VM_REPOSITORY/kmod" GDR_TESTS=m
}

# Those of the calling task that ask for it (fail-nth), whatever they allocate.
failing_allocations() {
    local cache
    # Not kmemleak's own, which would give up.
    for cache in /sys/kernel/slab/*; do
        [[ $cache = */kmemleak* ]] || echo 1 >"$cache/failslab"
    done
    echo Y >/sys/kernel/debug/failslab/cache-filter
    echo N >/sys/kernel/debug/failslab/ignore-gfp-wait
    load gdr_provider
    of no_failure_in --nocapture
    load gdr_provider use_persistent_mapping=0
    of no_failure_in --nocapture
    unload
}

leaks() { echo "$1" >/sys/kernel/debug/kmemleak; }

# Of all that was allocated since the boot. Young objects are not told: their addresses may be on their way.
no_leaks() {
    ! grep -q kmemleak=off /proc/cmdline || { echo "skipped: kmemleak=off" && return; }
    leaks scan
    sleep 6
    leaks scan
    cat /sys/kernel/debug/kmemleak
    [ -z "$(cat /sys/kernel/debug/kmemleak)" ]
}

guest_run() {
    export VM_STEP_TIMEOUT=2400
    leaks scan=off || true # only when asked
    # A failure that was asked for is not told with a trace.
    echo 0 | tee /sys/kernel/debug/{failslab,fail_usercopy,fail_page_alloc}/verbose
    vm_step "persistent pins" raw_tests kmod:: gdr_provider
    vm_step "volatile pins" raw_tests kmod:: gdr_provider use_persistent_mapping=0
    vm_step "the crate" crate_tests
    vm_step "every allocation fails once" failing_allocations
    vm_step "loading and unloading" life
    vm_step "a fuzzer" fuzz 60
    vm_step "nothing is leaked" no_leaks
    vm_step "lockdep is still on" grep -qE 'debug_locks: +1' /proc/lockdep_stats
}
