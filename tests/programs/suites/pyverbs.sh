# shellcheck shell=bash
# rdma-core's Python tests, against the list of what passes and what the card refuses (pyverbs.list)

# shellcheck disable=SC2034
packages=(
    /usr/lib/python3/dist-packages/pyverbs/__init__.py:python3-pyverbs
    /usr/share/doc/rdma-core:rdma-core /etc/libibverbs.d/mlx5.driver:ibverbs-providers ip:iproute2
)
patience=${PATIENCE:-300}

# The package rdma-core has the tests among its documents, which images of containers often leave out.
fetch() {
    local from=/usr/share/doc/rdma-core/tests
    if [ ! -e $from/run_tests.py ]; then
        timeout 120 apt-get -qq download rdma-core || return
        dpkg-deb -x rdma-core_*.deb package
        from=package$from
    fi
    mkdir tests
    cp $from/* tests/
    gunzip -f tests/*.gz
    test -e tests/run_tests.py
}

# Newer tests ask `rdma link show -j` of iproute2 for the network device, which needs the kernel's netlink. This says the same.
link_tool() {
    mkdir -p bin
    cat >bin/rdma <<'END'
#!/bin/bash
[ "$*" = "link show -j" ] || exit 1
device=/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0
[ -e $device ] && netdev=",\"netdev\":\"$(cat $device)\""
echo "[{\"ifindex\":0,\"ifname\":\"mlx5_0\",\"port\":1,\"state\":\"ACTIVE\"$netdev}]"
END
    chmod +x bin/rdma
}

# verdicts FILE: `GROUP TEST VERDICT` for each test. What a test itself prints may hide the verdict of a skipped one.
verdicts() {
    awk '
        /^test_[a-z0-9_]+ \(tests\./ { split($2, part, "."); group = part[2]; test = $1 }
        group != "" && match($0, /\.\.\. .*(ok|skipped .*)$/) {
            print group, test, ($0 ~ /ok$/ ? "ok" : "skipped")
            group = ""
        }
        /^(ERROR|FAIL): test_/ { split($3, part, "."); print part[2], $2, "failed" }
    ' "$1"
}

# compare FILE: whether the tests do what the list says.
compare() {
    local word name rest passed status=0 file
    file=$(mktemp -p .)
    verdicts "$1" >"$file"
    while read -r word name rest; do
        passed=$(awk -v group="$name" '$1 == group && $3 == "ok"' "$file" | wc -l)
        case $word in
            runs)
                echo "$name: $passed passed"
                ((passed >= rest)) || { echo "$name: at least $rest have to pass" && status=1; }
                ;;
            skips)
                ((passed == 0)) || { echo "$name: $passed passed, and the list says that it skips: $rest" && status=1; }
                ;;
            fails)
                ! grep -qE " $name (ok|skipped)$" "$file" ||
                    { echo "$name: did not fail, and the list says that it does: $rest" && status=1; }
                ;;
        esac
    done < <(grep -v '^#' "$here/suites/pyverbs.list")
    # Other versions have other tests: of theirs none may fail that the list does not name.
    [ -z "$release" ] || status=0
    while read -r name; do
        grep -q "^fails $name " "$here/suites/pyverbs.list" || { echo "$name: failed" && status=1; }
    done < <(awk '$3 == "failed" { print $2 }' "$file")
    ((status == 0)) && echo "as listed"
    return $status
}

programs() {
    local link
    check "tests of rdma-core" '' fetch
    link_tool
    for link in eth ib; do
        # Exits with 1, since some fail.
        check "run_tests.py ($link)" '^Ran [0-9]+ tests' run_tests "$link"
        check "compared with the list ($link)" '^as listed$' compare "$(log_of "run_tests.py ($link)")"
    done
}

run_tests() {
    # Debian's own interpreter has the module.
    PATH=$PWD/bin:$PATH card "$1" /usr/bin/python3 tests/run_tests.py --dev mlx5_0 -v || (($? == 1))
}
