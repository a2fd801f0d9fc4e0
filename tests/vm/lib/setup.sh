# shellcheck shell=bash
# What the VM is made of, fetched and built where it is missing: QEMU, a stock Debian kernel, an initial file system.
# All of it but the packages lies below $cache; remove that folder to renew it.

# The whole command is at fault: 125 on a machine that could have been set up, 77 where that is impossible.
fail() {
    echo "tests/vm/run: $1" >&2
    exit 125
}

cannot() {
    echo "tests/vm/run: cannot be set up here: $1" >&2
    exit 77
}

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# Runs an apt command; where it fails, once more with fresh package lists.
apt() {
    timeout 900 "$@" >"$cache/apt.log" 2>&1 && return
    if [ "$(id -u)" = 0 ]; then
        local try
        for try in 1 2 3; do # another apt may hold the lists
            timeout 300 apt-get -q update >>"$cache/apt.log" 2>&1 && break
            sleep "$try"
        done
        timeout 900 "$@" >>"$cache/apt.log" 2>&1 && return
    fi
    tail -5 "$cache/apt.log" >&2
    return 1
}

# need COMMAND:PACKAGE | :PACKAGE ...: installs what is missing. Without a command, dpkg knows.
need() {
    local missing one
    list_missing missing "$@"
    ((${#missing[@]})) || return 0
    one="apt-get install ${missing[*]}"
    command -v apt-get >/dev/null || cannot "no ${missing[*]}, and no apt-get; Debian's packages of these names have them"
    can_install || cannot "no ${missing[*]}; as root: $one"
    echo "tests/vm/run: $one" >&2
    DEBIAN_FRONTEND=noninteractive apt apt-get -q -y -o DPkg::Lock::Timeout=600 --no-install-recommends install \
        "${missing[@]}" || fail "'$one' failed; see $cache/apt.log"
    list_missing missing "$@"
    ((${#missing[@]} == 0)) || fail "still missing after '$one': ${missing[*]}"
}

list_missing() {
    local -n into=$1
    local one
    into=()
    for one in "${@:2}"; do
        if [ -n "${one%%:*}" ]; then
            command -v "${one%%:*}" >/dev/null
        else
            [ "$(dpkg-query -W -f '${db:Status-Status}' "${one#:}" 2>/dev/null)" = installed ]
        fi || into+=("${one##*:}")
    done
}

# fetch FOLDER PACKAGE...: unpacks packages below FOLDER without installing them.
fetch() {
    local folder=$1 work tool
    shift
    for tool in apt-get dpkg-deb; do
        command -v "$tool" >/dev/null || cannot "no $tool, which fetches Debian's $*"
    done
    work=$(mktemp -d "$cache/fetch.XXXXXX")
    if ! (cd "$work" && apt apt-get -q download "$@"); then
        rm -r "$work"
        can_install || cannot "'apt-get download $*' failed; as root: apt-get update"
        fail "'apt-get download $*' failed; see $cache/apt.log"
    fi
    local deb
    for deb in "$work"/*.deb; do
        # Of the modules, what no test here asks for is most of it.
        dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$folder" --exclude='./usr/share' --exclude='*/kernel/sound' \
            --exclude='*/kernel/drivers/'{gpu,media,staging,usb,scsi,iio,hwmon,input,hid,mtd,isdn,firmware,platform} \
            --exclude='*/kernel/drivers/net/'{wireless,can,usb,phy,arcnet,hamradio,wan,dsa,ieee802154}
    done
    rm -r "$work"
}

# Runs a function while no other run changes the cache.
locked() (
    flock -w 3600 9 || fail "another run has held $cache/lock for an hour"
    "$@"
) 9>"$cache/lock"

set_up() {
    mkdir -p "$cache/kernels"
    kernel=$cache/kernels/$kernel_name
    initrd=$kernel/initrd-$(sha256sum <"$vm/init" | cut -c1-12).cpio
    locked fill_cache
    release=$(<"$kernel/release")
}

fill_cache() {
    [ "$(uname -sm)" = "Linux x86_64" ] || cannot "the guest runs this machine's programs, and is x86-64 Linux"
    need qemu-system-x86_64:qemu-system-x86 modprobe:kmod cpio:cpio xz:xz-utils zstd:zstd rdma:iproute2 \
        :ibverbs-providers ibv_devinfo:ibverbs-utils rping:rdmacm-utils
    if [ ! -x "$cache/bin/busybox" ]; then
        rm -rf "$cache/busybox.new" && mkdir "$cache/busybox.new"
        fetch "$cache/busybox.new" busybox-static
        mkdir -p "$cache/bin"
        find "$cache/busybox.new" -name busybox -type f -exec cp {} "$cache/bin/busybox" \;
        rm -r "$cache/busybox.new"
    fi
    if [ ! -e "$kernel/release" ]; then
        rm -rf "$kernel.new"
        mkdir -p "$kernel.new/root"
        case $kernel_name in
            debug) build_debug_kernel "$kernel.new" ;;
            stock) stock_kernel linux-image-amd64 "$kernel.new" ;;
            *) stock_kernel "linux-image-$kernel_name-amd64" "$kernel.new" ;;
        esac
        mv "$kernel.new" "$kernel"
    fi
    release=$(<"$kernel/release")
    [ -e "$initrd" ] || make_initrd
}

# The names of kernels carry an ABI number, so a meta package has to say which one it is.
stock_kernel() {
    local meta=$1 new=$2 image name
    image=$(resolve "$meta")
    if [ -z "$image" ] && can_install; then
        apt apt-get -q update || fail "'apt-get update' failed; see $cache/apt.log"
        image=$(resolve "$meta")
    fi
    if [ -z "$image" ]; then
        can_install && grep -qx ID=debian /etc/os-release && fail "apt knows no $meta"
        cannot "apt knows no $meta: not Debian, or as root: apt-get update"
    fi
    name=${image#linux-image-}
    echo "tests/vm/run: fetching $image" >&2
    fetch "$new/root" "$image"
    [ -d "$new/root/usr/lib/modules" ] && mv "$new/root/usr/lib" "$new/root/lib"
    depmod -b "$new/root" "$name"
    extract_vmlinux "$new/root/boot/vmlinuz-$name" "$new/vmlinux"
    rm -r "$new/root/boot"
    echo "$name" >"$new/release"
}

resolve() {
    command -v apt-cache >/dev/null || return 0
    { apt-cache depends "$1" 2>/dev/null || true; } | sed -n 's/^ *Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -1
}

# QEMU starts an uncompressed kernel directly; under emulation unpacking itself would take it seconds.
extract_vmlinux() {
    local sectors offset length magic
    sectors=$(od -An -tu1 -j $((0x1f1)) -N1 "$1")
    read -r offset length < <(od -An -tu4 -j $((0x248)) -N8 "$1")
    offset=$(((sectors + 1) * 512 + offset))
    magic=$(od -An -tx1 -j "$offset" -N4 "$1")
    # Behind the compressed data stands its size, in four bytes.
    dd if="$1" of="$2.part" iflag=skip_bytes,count_bytes bs=64K skip="$offset" count=$((length - 4)) status=none
    case $magic in
        " fd 37 7a 58") xz -dc "$2.part" >"$2" ;;
        " 28 b5 2f fd") zstd -dcq "$2.part" >"$2" ;;
        *) fail "$1 is compressed neither by xz nor by zstd" ;;
    esac
    rm "$2.part"
}

make_initrd() {
    local tree module file name release
    release=$(<"$kernel/release")
    tree=$(mktemp -d "$cache/initrd.XXXXXX")
    mkdir "$tree/bin" "$tree/modules"
    cp "$cache/bin/busybox" "$tree/bin/"
    install -m 755 "$vm/init" "$tree/init"
    : >"$tree/modules/order"
    for module in virtio_pci 9pnet_virtio 9p overlay; do
        modprobe -d "$kernel/root" -S "$release" --show-depends "$module" >"$tree/depends" 2>/dev/null ||
            [ "$kernel_name" = debug ] || fail "the kernel $release has no module $module"
        while read -r file; do
            name=$(basename "${file%.xz}")
            [ -e "$tree/modules/$name" ] && continue
            case $file in
                *.xz) xz -dc "$file" >"$tree/modules/$name" ;;
                *) cp "$file" "$tree/modules/$name" ;;
            esac
            echo "$name" >>"$tree/modules/order"
        done < <(sed -n 's/^insmod \([^ ]*\).*/\1/p' "$tree/depends")
    done
    rm -f "$tree/depends" "$kernel"/initrd-*.cpio
    (cd "$tree" && find . | cpio -o -H newc --quiet) >"$initrd.new"
    mv "$initrd.new" "$initrd"
    rm -r "$tree"
}
