# shellcheck shell=bash
# gdsync's own tests that run on the card, with the libraries of another release

# shellcheck disable=SC2034
packages=(/etc/libibverbs.d/mlx5.driver:ibverbs-providers)
patience=${PATIENCE:-600}

programs() {
    local test
    if [ -z "$release" ]; then
        echo "cargo test runs them on what is installed"
        return
    fi
    for test in $GDSYNC_TESTS; do
        # Those that need a device, and requests by libmlx5 and by our encoder, byte for byte.
        check "$(basename "$test")" 'test result: ok' timeout "$patience" "$test" card differential
    done
}
