# shellcheck shell=bash
# our gdrdrv in a real kernel, over a made-up GPU driver: every request, mappings, owners, frees, dma-bufs, threads

# shellcheck disable=SC2034 # for the runner
devices=() timeout=1500
# shellcheck disable=SC2034
qemu_args=(-object memory-backend-memfd,id=bar,size=32M,share=on -device ivshmem-plain,memdev=bar)
# What the module says when it is made to meet nonsense.
# shellcheck disable=SC2034
tolerated='gdrdrv: (the driver|the GPU|no NVIDIA|nv-p2p-dummy)|failing symbol_get'

host_build() {
    vm_cargo test --no-run -p gdrcopy --lib
    vm_build_module "$VM_REPOSITORY/kmod" GDR_TESTS=m
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
    GDRCOPY_TEST_KMOD=1 "$(vm_built gdrcopy)" --test-threads=1 "$@"
}

guest_run() {
    export VM_STEP_TIMEOUT=600
    vm_step "persistent pins" bash_tests gdr_provider
    vm_step "volatile pins" bash_tests gdr_provider use_persistent_mapping=0
}

bash_tests() {
    load "$@"
    of gdrdrv::tests::kmod
    unload
}
