# shellcheck shell=bash
# What suites use inside the guest.

# vm_devices NAME...: makes RDMA devices. Each has a network device of its own; between two of them nothing passes.
vm_devices() {
    local name number
    ((!$#)) || modprobe -a ib_uverbs rdma_ucm ib_umad dummy
    for name; do
        case $name in
            rxe0) number=0 ;;
            rxe1) number=1 ;;
            *) echo "no such device: $name (rxe0, rxe1)" >&2 && return 1 ;;
        esac
        [ -e "/sys/class/net/dummy$number" ] || ip link add "dummy$number" type dummy
        ip addr add "10.9.$number.1/24" dev "dummy$number"
        ip link set "dummy$number" up
        modprobe -a crc32_generic rdma_rxe # no dependency names the hash
        rdma link add "$name" type rxe netdev "dummy$number"
    done
}

vm_steps=0
vm_first_failure=0

# vm_step TEXT COMMAND...: runs a command or a function, for VM_STEP_TIMEOUT (120) seconds at most. A failure fails the suite at its end.
vm_step() {
    local text=$1 status=0 start=$SECONDS
    shift
    vm_steps=$((vm_steps + 1))
    # shellcheck disable=SC2046 # names of functions
    export -f $(compgen -A function)
    # shellcheck disable=SC2016 # for the inner shell
    timeout -k 5 "${VM_STEP_TIMEOUT:-120}" bash -Eeuo pipefail -c '"$@"' step "$@" || status=$?
    if ((status == 0)); then
        echo "ok: $text ($((SECONDS - start)) s)"
    else
        ((status == 124)) && echo "timed out after ${VM_STEP_TIMEOUT:-120} s"
        echo "FAILED, status $status: $text"
        ((vm_first_failure)) || vm_first_failure=$status
    fi
}

# vm_built NAME: the path of what host_build made by vm_cargo.
vm_built() {
    awk -F '\t' -v name="$1" '$1 == name { print $3; found = 1 } END { exit !found }' "$VM_OUT/built" ||
        { echo "host_build has not built $1" >&2 && return 1; }
}

# vm_test NAME [ARGUMENT...]: a step for a test program that host_build made. What it skips fails: here is all it could ask for.
vm_test() {
    local name=$1 folder program found=0 device=${GDSYNC_TEST_DEVICE:-${GDSYNC_DEVICE:-}}
    shift
    while IFS=$'\t' read -r folder program; do
        found=1
        vm_step "$name${device:+ on $device}" vm_without_skips "$folder" "$program" --nocapture "$@"
    done < <(awk -F '\t' -v name="$name" '$1 == name && $4 == "test" { print $2 "\t" $3 }' "$VM_OUT/built")
    ((found)) || vm_step "$name, which host_build has not built" false
}

vm_without_skips() {
    local folder=$1
    shift
    cd "$folder" || return
    "$@" 2>&1 | tee /tmp/vm-test-output
    ! grep -a '^skipped' /tmp/vm-test-output
}

# vm_tests [ARGUMENT...]: vm_test for all of them.
vm_tests() {
    local name
    while read -r name; do
        vm_test "$name" "$@"
    done < <(awk -F '\t' '$4 == "test" { print $1 }' "$VM_OUT/built" | sort -u)
}

vm_suite() {
    guest_run
    ((vm_steps)) || { echo "FAILED: the suite has no step" && exit 1; }
    exit "$vm_first_failure"
}
