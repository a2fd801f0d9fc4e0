# shellcheck shell=bash
# Kernel modules for the guest, built on the host against the headers of the guest's kernel.

# Prints the folder to give to make -C. Fetches the headers where they are missing; nothing is installed but tools.
kernel_headers() {
    local build=$kernel/root/usr/src/linux-headers-$release flavour kbuild
    if [ "$kernel_name" = debug ]; then
        echo "$kernel/build"
        return
    fi
    need make:make gcc:gcc >&2
    if [ ! -e "$kernel/headers" ]; then
        flavour=${release%-amd64}
        kbuild=$(apt-cache depends "linux-headers-$release" | sed -n 's/^ *Depends: \(linux-kbuild-[^ ]*\)$/\1/p' | head -1)
        [ -n "$kbuild" ] || fail "apt does not know linux-headers-$release any more; remove $kernel for a newer kernel"
        fetch "$kernel/root" "linux-headers-$release" "linux-headers-$flavour-common" "$kbuild"
        # The one absolute path in them.
        sed -i "s|/usr/src/|$kernel/root/usr/src/|" "$build/Makefile"
        touch "$kernel/headers"
    fi
    echo "$build"
}

# vm_build_module DIR [MAKE ARGUMENT...]: builds the module in DIR (a Kbuild makefile) into $VM_OUT/NAME-OF-DIR, so that
# kernels do not mix. Prints that folder.
vm_build_module() {
    local source=$1 into build
    into=$VM_OUT/$(basename "$1")
    build=$(locked kernel_headers)
    shift
    rm -rf "$into"
    mkdir -p "$into"
    cp -r "$source/." "$into/"
    timeout 600 make -s -C "$build" M="$into" "$@" modules >&2 || return
    echo "$into"
}

# kernel_source SERIES FOLDER: unpacks Debian's source of that kernel.
kernel_source() {
    local series=$1 into=$2 archive=$cache/source/linux-source-$1.tar.xz
    if [ ! -e "$archive" ]; then
        mkdir -p "$cache/source"
        source_work=$(mktemp -d "$cache/source.XXXXXX")
        fetch "$source_work" "linux-source-$series"
        mv "$source_work/usr/src/linux-source-$series.tar.xz" "$archive"
        rm -r "$source_work"
    fi
    tar -xJf "$archive" -C "$into" --strip-components=1 "linux-source-$series"
}
