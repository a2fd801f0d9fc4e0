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
    dpkg -r gdasync-gdrdrv-dkms
    is_gone
}

# Its scripts are those of the deb; a build takes minutes here.
rpm_() {
    local file
    mkdir -p /var/lib/rpm
    dpkg-deb -x "$VM_OUT"/packages/*.deb /tmp/deb
    rpm -i --nodeps --noscripts "$VM_OUT"/packages/*.rpm # what it requires, Debian's packages have
    for file in $(cd /tmp/deb && find . -type f ! -path './usr/share/doc/*'); do
        cmp "/tmp/deb/$file" "/$file"
    done
    [[ $(rpm -qp --scripts "$VM_OUT"/packages/*.rpm) = *'dkms install -m gdasync-gdrdrv'* ]]
    rpm -e --nodeps --noscripts gdasync-gdrdrv-dkms
    ! ls -d /usr/src/gdasync-gdrdrv-*
}

guest_run() {
    export VM_STEP_TIMEOUT=800
    ln -sfn "$(cat "$VM_OUT/headers")" "/lib/modules/$(uname -r)/build"
    vm_step "deb" deb
    vm_step "rpm" rpm_
}
