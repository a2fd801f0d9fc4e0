# shellcheck shell=bash
# One boot of the guest.

# What a healthy kernel does not say.
complaints='WARNING: |BUG: |Oops|KASAN|UBSAN|Call Trace|general protection|INFO: (task|rcu|possible)'
complaints+='|possible circular|refcount_t|corruption|kmemleak: [0-9]+ new'

# The environment of this process, as shell text for the guest.
environment() {
    local one
    while IFS= read -r -d '' one; do
        [[ $one =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || continue
        case ${one%%=*} in SHLVL | _ | PWD | OLDPWD) continue ;; esac
        printf 'export %s=%q\n' "${one%%=*}" "${one#*=}"
    done < <(env -0)
}

# boot NAME <SCRIPT: runs a bash script in the guest, its output on this standard output, and returns its status, or
# 125 where the guest or its kernel failed.
boot() {
    local name=$1 status=125 why='' start
    share=$(mktemp -d "$cache/run.XXXXXX")
    chmod 700 "$share"
    environment >"$share/script"
    cat >>"$share/script"
    printf 'KERNEL_ROOT=%q\n' "$kernel/root" >"$share/kernel"
    : >"$share/output"

    # Two guests at once on a small machine take longer than one after the other, and starve each other.
    exec {turn}>"${TMPDIR:-/tmp}/gdasync-vm-$(id -u).lock"
    flock -n "$turn" || {
        echo "tests/vm/run: waiting for another run" >&2
        flock -w 3600 "$turn" || fail "another run has held the lock for an hour"
    }
    start=$SECONDS
    emulate
    exec {turn}>&-

    if [ -s "$share/status" ]; then
        status=$(<"$share/status")
        if grep -qE "$complaints" <(grep -vE "${tolerated:-^$}" "$share/dmesg"); then
            why="the guest's kernel complained:"
            grep -E -m1 -A30 "$complaints" <(grep -vE "${tolerated:-^$}" "$share/dmesg") >"$share/reason"
            [ "$status" != 0 ] || status=125
        fi
    else
        tail -40 "$share/console" >"$share/reason"
        if grep -q 'Kernel panic' "$share/console"; then
            why="the guest's kernel panicked:"
        elif ((ended == 124 || ended == 137)); then
            why="the guest did not end within VMTIMEOUT=$limit s; its console:"
        else
            why="the guest ended without a report (QEMU's status: $ended); its console:"
        fi
    fi
    if [ -n "$why" ]; then
        echo "tests/vm/run: $why" >&2
        cat "$share/reason" >&2
    fi
    if [ "$keep_log" = 1 ]; then
        mkdir -p "$cache/logs"
        rm -rf "$cache/logs/$name" "$share/script" # the environment may hold secrets
        mv "$share" "$cache/logs/$name"
        echo "tests/vm/run: $name: status $status, $((SECONDS - start)) s, logs in $cache/logs/$name" >&2
    fi
    rm -rf "$share"
    return "$status"
}

# Runs QEMU until the guest ends; only a boot that died before PID 1 is tried again.
emulate() {
    local try follow
    limit=${VMTIMEOUT:-${timeout:-300}}
    for try in 1 2 3; do
        : >"$share/console"
        # shellcheck disable=SC2086 # VMARGS is a list of words
        timeout -k 5 "$limit" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m "${memory:-2048}" \
            -nodefaults -display none -no-reboot -kernel "$kernel/vmlinux" -initrd "$initrd" \
            -append "console=ttyS0 quiet loglevel=5 panic=-1 oops=panic log_buf_len=4M ${VMAPPEND:-}" -serial "file:$share/console" \
            -virtfs local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap \
            -virtfs "local,path=$share,mount_tag=out,security_model=none" \
            "${qemu_args[@]}" ${VMARGS:-} </dev/null 2>"$share/qemu" &
        emulator=$!
        tail -n +1 -f -s 0.2 --pid="$emulator" "$share/output" &
        follow=$!
        ended=0
        wait "$emulator" || ended=$?
        emulator=
        wait "$follow" || true
        cat "$share/qemu" >&2
        [ -s "$share/status" ] && break
        ((ended == 124 || ended == 137)) && break
        grep -q VM-INIT "$share/console" && break
        echo "tests/vm/run: boot $try died early" >&2
    done
}
