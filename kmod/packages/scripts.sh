# shellcheck shell=sh
# What both kinds of package do after they were installed and before they are removed. A kernel without headers is no error:
# DKMS builds when they come.
after_install() {
    dkms add -m gdasync-gdrdrv -v "$1" >/dev/null 2>&1 || true
    if [ -e "/lib/modules/$(uname -r)/build" ]; then
        dkms install -m gdasync-gdrdrv -v "$1" --force && modprobe gdrdrv || true
    else
        echo "gdrdrv: no headers of $(uname -r); install them, then: dkms install gdasync-gdrdrv/$1"
    fi
    udevadm control --reload 2>/dev/null && udevadm trigger --subsystem-match=gdrdrv 2>/dev/null || true
}

# A module that is in use stays loaded until the next boot.
before_remove() {
    rmmod gdrdrv 2>/dev/null || true
    dkms remove -m gdasync-gdrdrv -v "$1" --all || true
}
