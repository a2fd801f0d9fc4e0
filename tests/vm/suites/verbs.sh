# shellcheck shell=bash
# gdsync's tests of verbs and of two processes, on the guest's kernel

host_build() { vm_cargo test --no-run --workspace --test verbs --test queues --test errors --test processes; }

guest_run() { vm_tests; }
