# shellcheck shell=bash
# Rust programs for a suite, built on the host.

# vm_cargo ARGUMENT...: runs cargo (build, test --no-run) and notes in $VM_OUT/built what programs came out: name, folder of
# the package, path, kind.
vm_cargo() {
    command -v cargo >/dev/null || fail "no cargo in PATH"
    (cd "$repository" && timeout 1800 cargo "$@" --message-format=json-render-diagnostics) >"$VM_OUT/messages" || return
    sed -n 's/.*"manifest_path":"\([^"]*\)\/Cargo.toml".*"kind":\["\([^"]*\)"\].*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\3\t\1\t\4\t\2/p' \
        "$VM_OUT/messages" >>"$VM_OUT/built"
    rm "$VM_OUT/messages"
}
