# shellcheck shell=bash
# our gdrdrv in a real kernel, over a made-up GPU driver: every request, mappings, owners, frees, dma-bufs, threads

# shellcheck disable=SC2034 # for the runner
devices=() timeout=3600 memory=3072
# shellcheck disable=SC2034,SC2054
qemu_args=(-object memory-backend-memfd,id=bar,size=256M,share=on -device ivshmem-plain,memdev=bar)
# What the module says when it is made to meet nonsense.
# shellcheck disable=SC2034
tolerated='gdrdrv: (the driver|the GPU|no NVIDIA|nv-p2p-dummy)|failing symbol_get'

host_build() {
    vm_cargo test --no-run -p gdrcopy --test it
    need sparse:sparse
    vm_build_module "$VM_REPOSITORY/kmod" GDR_TESTS=m C=1 CF=-Wsparse-error
}

# Steps run in shells of their own, to which only this is passed on.
export modules=${VM_OUT:-}/kmod

# load PROVIDER [PARAMETER...]: this driver and our module, freshly.
load() {
    unload
    [ "$1" = none ] || insmod "$modules/tests/provider/$1.ko"
    insmod "$modules/gdrdrv.ko" "${@:2}"
}

unload() {
    local module
    for module in gdrdrv gdr_provider gdr_provider_old nv_p2p_dummy gdr_provider_nongpl; do
        [ ! -e "/sys/module/$module" ] || rmmod "$module"
    done
}

# of PATTERN: those tests of the crate, one after the other.
of() {
    GDRCOPY_TEST_KMOD=1 "$(vm_built it)" --test-threads=1 "$@"
}

# What the crate's backends promise, on the module instead of a simulated one. Left out: what only a simulated one can be (of
# another version, out of BAR1, lying, without dma-bufs), and tests of other backends.
crate_tests() {
    load gdr_provider
    of contract:: located:: gdrdrv::errors:: \
        --skip of_bar1_that_is_full --skip errors::of_a_pin --skip that_pins_something_else --skip where_the_memory_ends --skip that_comes_after_the_pin
    of pin_stress::
    load gdr_provider use_persistent_mapping=0
    of gdrdrv::volatile:: --skip access_to_freed
    unload
}

# raw_tests TESTS PROVIDER [PARAMETER...]
raw_tests() {
    load "${@:2}"
    of "$1" --nocapture
    unload
}

# GPU drivers that are old, missing, not for modules of the GPL, or a dummy: they cannot be bound to.
other_drivers() {
    local driver
    raw_tests kmod:: gdr_provider_old
    load none
    insmod "$modules/tests/provider/gdr_provider.ko" # later than the module
    of kmod::maps
    for driver in none nv-p2p-dummy gdr_provider_nongpl; do
        load $driver
        grep -qx 'NVIDIA driver: none' /proc/driver/gdrdrv/params
        GDRCOPY_TEST_KMOD_DRIVER=none of pins_of_addresses_are_enodev
        # Nothing holds it.
        [ $driver = none ] || rmmod "${driver//-/_}"
    done
    [[ $(dmesg) = *'gdrdrv: nv-p2p-dummy is loaded in place of the NVIDIA driver'* ]]
    unload
}

# Loading and unloading, while files are open and not.
life() {
    local round
    load gdr_provider
    exec 7<>/dev/gdrdrv
    ! rmmod gdrdrv
    exec 7>&-
    rmmod gdrdrv
    [ ! -e /dev/gdrdrv ] && [ ! -e /proc/driver/gdrdrv ] && ! grep gdrdrv /proc/devices
    for ((round = 0; round < 20; round++)); do
        insmod "$modules/gdrdrv.ko"
        [ "$(stat -c %a /dev/gdrdrv)" = 666 ]
        rmmod gdrdrv
    done
    insmod "$modules/gdrdrv.ko" device_mode=0600
    [ "$(stat -c %a /dev/gdrdrv)" = 600 ]
    # While others use it.
    unload
    load gdr_provider
    of kmod::stress &
    local tests=$!
    while kill -0 $tests 2>/dev/null; do rmmod gdrdrv 2>/dev/null && insmod "$modules/gdrdrv.ko"; sleep 0.05; done || true
    wait $tests || true # a file that was not there for a moment fails it; the kernel must not mind
    unload
}

guest_run() {
    export VM_STEP_TIMEOUT=2400 # minutes on a machine that does nothing else
    vm_step "the crate" crate_tests
    vm_step "persistent pins" raw_tests kmod:: gdr_provider
    vm_step "volatile pins" raw_tests kmod:: gdr_provider use_persistent_mapping=0
    vm_step "large handles" raw_tests kmod:: gdr_provider first_handle=$((0x123456789))
    vm_step "without dma-bufs" raw_tests kmod::pins gdr_provider dmabuf=0
    vm_step "other drivers" other_drivers
    vm_step "loading and unloading" life
    local each=${KMOD_ROUNDS:-50000}
    vm_step "$((2 * each)) pins and mappings in each mode" rounds "$each"
    vm_step "a fuzzer" fuzz 30
}

rounds() {
    load gdr_provider use_persistent_mapping=0
    GDRCOPY_KMOD_ROUNDS=$1 of pins_maps_unmaps_frees
    load gdr_provider
    GDRCOPY_KMOD_ROUNDS=$1 of pins_maps_unmaps_frees
    unload
}

fuzz() {
    local persistent
    for persistent in 0 1; do
        load gdr_provider use_persistent_mapping=$persistent
        GDRCOPY_KMOD_FUZZ=$(($1 / 2)) of random_requests --nocapture
    done
    unload
}
