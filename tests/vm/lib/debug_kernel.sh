# shellcheck shell=bash
# A kernel that watches itself: KASAN, lockdep, kmemleak, fault injection. Built from Debian's source, with everything the
# guest needs inside, so that only the modules under test are modules.

debug_series=6.12

debug_options='
64BIT SMP PCI ACPI HYPERVISOR_GUEST PARAVIRT PVH TTY SERIAL_8250 SERIAL_8250_CONSOLE PRINTK_TIME DEVPORT MAGIC_SYSRQ
BLK_DEV_INITRD BINFMT_ELF BINFMT_SCRIPT MODULES MODULE_UNLOAD PROC_FS SYSFS TMPFS TMPFS_XATTR TMPFS_POSIX_ACL DEVTMPFS
UNIX98_PTYS SYSVIPC POSIX_MQUEUE HUGETLBFS MEMFD_CREATE CPUSETS CGROUPS NAMESPACES CROSS_MEMORY_ATTACH
TRANSPARENT_HUGEPAGE USERFAULTFD POSIX_TIMERS HIGH_RES_TIMERS NO_HZ_IDLE KALLSYMS KALLSYMS_ALL
VIRTIO_MENU VIRTIO_PCI NETWORK_FILESYSTEMS NET_9P NET_9P_VIRTIO 9P_FS OVERLAY_FS
NET UNIX INET IPV6 NETDEVICES NET_CORE DUMMY VETH VIRTIO_NET NET_SCHED NET_SCH_NETEM
INFINIBAND INFINIBAND_USER_ACCESS INFINIBAND_USER_MAD INFINIBAND_ADDR_TRANS RDMA_RXE
CRYPTO CRYPTO_CRC32 CRYPTO_CRC32C LIBCRC32C SYNC_FILE UDMABUF DMABUF_HEAPS DMABUF_HEAPS_SYSTEM
DEBUG_KERNEL DEBUG_FS DEBUG_BUGVERBOSE STACKTRACE FRAME_WARN=0 KASAN KASAN_GENERIC KASAN_INLINE KASAN_VMALLOC
PROVE_LOCKING DEBUG_ATOMIC_SLEEP DEBUG_LIST DEBUG_VM DEBUG_OBJECTS DEBUG_OBJECTS_FREE DEBUG_OBJECTS_WORK
DEBUG_KMEMLEAK DETECT_HUNG_TASK SLUB_DEBUG UBSAN UBSAN_BOUNDS UBSAN_SHIFT
FAULT_INJECTION FAULT_INJECTION_DEBUG_FS FAILSLAB FAIL_PAGE_ALLOC FAULT_INJECTION_USERCOPY'

# build_debug_kernel FOLDER: what stock_kernel makes, and below build/ the tree that modules are built in.
build_debug_kernel() {
    local new=$1 option
    need make:make gcc:gcc flex:flex bison:bison bc:bc :libelf-dev :libssl-dev
    echo "tests/vm/run: building a debug kernel from linux-source-$debug_series, some five minutes" >&2
    mkdir "$new/build"
    kernel_source "$debug_series" "$new/build"
    for option in $debug_options; do
        case $option in
            *=*) echo "CONFIG_$option" ;;
            *) echo "CONFIG_$option=y" ;;
        esac
    done >"$new/options"
    debug_make() { timeout 3600 make -s -C "$new/build" "$@" >>"$cache/debug_kernel.log" 2>&1; }
    : >"$cache/debug_kernel.log"
    KCONFIG_ALLCONFIG=$new/options debug_make allnoconfig
    for option in KASAN PROVE_LOCKING DEBUG_KMEMLEAK FAILSLAB RDMA_RXE 9P_FS OVERLAY_FS UDMABUF; do
        grep -qx "CONFIG_$option=y" "$new/build/.config" || fail "CONFIG_$option wants something that this source lacks"
    done
    debug_make -j"$(nproc)" vmlinux modules && debug_make INSTALL_MOD_PATH="$new/root" modules_install ||
        fail "the debug kernel did not build; see $cache/debug_kernel.log"
    cp "$new/build/vmlinux" "$new/vmlinux"
    make -s -C "$new/build" kernelrelease >"$new/release"
}
