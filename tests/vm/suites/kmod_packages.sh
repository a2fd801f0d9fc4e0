# shellcheck shell=bash
# the packages of our gdrdrv: DKMS builds, loads and removes it; the device file is there

# shellcheck disable=SC2034 # for the runner
devices=() timeout=900 packages=(dkms:dkms rpmbuild:rpm dpkg-deb:dpkg)

host_build() {
    kmod/packages/build "$VM_OUT/packages"
    locked kernel_headers >"$VM_OUT/headers"
}

is_loaded() {
    [ -c /dev/gdrdrv ] && grep -q 'Version: 2.6' /proc/driver/gdrdrv/params
    dkms status gdasync-gdrdrv | grep installed
    [ "$(modinfo -F depends gdrdrv)" = "" ]
}

is_gone() {
    [ ! -e /dev/gdrdrv ]
    [ -z "$(dkms status gdasync-gdrdrv)" ]
    ! modinfo gdrdrv
}

deb() {
    dpkg -i "$VM_OUT"/packages/*.deb
    is_loaded
    dpkg -i "$VM_OUT"/packages/*.deb # once more, as an update does
    is_loaded
    dpkg -r gdasync-gdrdrv-dkms
    is_gone
}

rpm_() {
    mkdir -p /var/lib/rpm
    rpm -i --nodeps "$VM_OUT"/packages/*.rpm # what it requires, Debian's packages have
    is_loaded
    rpm -e --nodeps gdasync-gdrdrv-dkms
    is_gone
}

guest_run() {
    export VM_STEP_TIMEOUT=400
    ln -sfn "$(cat "$VM_OUT/headers")" "/lib/modules/$(uname -r)/build"
    vm_step "deb" deb
    vm_step "rpm" rpm_
}
