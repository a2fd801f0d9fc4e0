# shellcheck shell=bash
# Other releases of Debian: roots in which families run with the versions of that release.

releases() {
    cat <<'END'
bullseye   rdma-core 33 and perftest 4.4 in a root of Debian 12: the C library of Debian 11 is too old for the card
trixie     Debian 13: rdma-core 56, UCX 1.18, Open MPI 5.0, MPICH 4.2
testing    the newest versions that Debian has
END
}

# make_root RELEASE FOLDER
make_root() {
    local suite=$1 partial=$2.partial hooks=()
    if ((EUID != 0)); then
        echo "skipped: the root of another release takes root"
        return 77
    fi
    need mmdebstrap:mmdebstrap unshare:util-linux || return
    if [ "$suite" = bullseye ]; then
        suite=bookworm
        # shellcheck disable=SC2016 # mmdebstrap sets $1
        hooks=(--setup-hook='sed -i "1{h;s/bookworm/bullseye/;G}" "$1"/etc/apt/sources.list'
            --setup-hook='printf "Package: src:rdma-core src:perftest\nPin: release n=bullseye\nPin-Priority: 1001\n" \
                >"$1"/etc/apt/preferences.d/bullseye')
    fi
    echo "makes a root of $1"
    rm -rf "$partial"
    mkdir -p "$(dirname "$partial")"
    # What a mirror says may be some weeks old.
    timeout 900 mmdebstrap --quiet --mode=root --variant=apt --aptopt='Acquire::Check-Valid-Until "false"' \
        "${hooks[@]}" "$suite" "$partial" >"$partial.log" 2>&1 ||
        { echo "skipped: mmdebstrap $suite failed, see $partial.log" && return 77; }
    mv "$partial" "$2"
}

# inside RELEASE COMMAND...: in its root, with this repository and Cargo's target folder at their places.
inside() {
    local root=$target/debian/$1
    [ -e "$root" ] || make_root "$1" "$root" || return
    # A mount namespace of its own: nothing stays mounted.
    # shellcheck disable=SC2016
    GDASYNC_INSIDE=1 unshare --mount -- bash -ec '
        root=$1 && shift
        for place in /proc /sys /dev; do mount --rbind $place "$root$place"; done
        for place in "$1" "$2" /tmp; do mkdir -p "$root$place" && mount --bind "$place" "$root$place"; done
        shift 2
        exec chroot "$root" "$@"' bash "$root" "$repository" "$target" "${@:2}"
}

# Tests of gdsync and of the card, for the family `gdsync`: a root has no Rust.
build_tests() {
    GDSYNC_TESTS=$(cd "$repository" && timeout 1800 cargo test --no-run -p gdsync -p gdsync-card --test it 2>&1 |
        sed -n "s|^ *Executable.*(\(.*\))$|$repository/\1|p")
    export GDSYNC_TESTS
}
