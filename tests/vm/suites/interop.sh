# shellcheck shell=bash
# gdsync and the ibverbs crate on one device: the same tables, and messages between the two

# shellcheck disable=SC2034
packages=(cmake:cmake python3:python3-minimal pkg-config:pkg-config :libnl-3-dev :libnl-route-3-dev :libclang-dev :libibverbs-dev)

host_build() { vm_cargo build --manifest-path interop/Cargo.toml; }

guest_run() { vm_step "gdsync-interop" "$(vm_built gdsync-interop)" rxe0; }
