# shellcheck shell=bash
# UCX's own unit tests of its InfiniBand transports (gtest), built from Debian's source

# shellcheck disable=SC2034
packages=(
    /etc/libibverbs.d/mlx5.driver:ibverbs-providers /usr/include/infiniband/mlx5dv.h:libibverbs-dev g++:g++ make:make
    autoreconf:autoconf automake:automake libtoolize:libtool dpkg-source:dpkg-dev
)
patience=${PATIENCE:-900}

# Not run, and why:
exclusions=(
    # Speed: hundreds of thousands of messages, one by one.
    '*/test_uct_perf.*' '*/test_uct_loopback.*' '*/test_uct_event.*'
    # Unmaps buffers whose writes are under way, which pinned pages would survive.
    '*/uct_p2p_rma_test_xfer.*'
    # 256 open devices of one process.
    '*/test_uct_peer_failure_multiple.*'
    # The same as those without, with each kind of allocation.
    '*/uct_p2p_rma_test_alloc_methods.*' '*/uct_p2p_mix_test_alloc_methods.*'
)

# Debian's source of UCX. What is built stays below Cargo's target folder.
build() {
    local source=$target/ucx folder
    [ ! -x "$source/test/gtest/gtest" ] || { echo "$source" && return; }
    rm -rf "$source" "$source.apt" && mkdir -p "$source.apt/lists/partial" && cd "$source.apt" || return
    # shellcheck source=/dev/null
    echo "deb-src http://deb.debian.org/debian $(. /etc/os-release && echo "$VERSION_CODENAME") main" >sources.list
    local apt=(-qq -o "Dir::Etc::sourcelist=$PWD/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$PWD/lists")
    apt-get "${apt[@]}" update && apt-get "${apt[@]}" source --download-only ucx || return
    tar xf ucx_*.orig.tar.* && mv ucx-*/ "$source" && cd "$source" || return
    # Files that its configure wants in a folder which the source package names otherwise.
    [ ! -d debian.upstream ] || cp -rn debian.upstream debian
    # GCC 12 does not inline what is called through a pointer, as this demands.
    sed -i 's/^#define UCT_INLINE_API .*/#define UCT_INLINE_API static inline __attribute__((unused))/' src/uct/api/uct_def.h
    ./autogen.sh && ./configure --enable-gtest --enable-mt --with-verbs --with-mlx5-dv --without-rdmacm --without-cuda \
        --without-java --without-go --disable-numa --enable-cma --disable-doxygen-doc || return
    # test_rc_max_wr waits 10 ms for completions, whatever else the cores do.
    sed -i 's/delta_ms=10.0/delta_ms=1000.0/' test/gtest/uct/ib/test_rc.h
    # Of the tests those of transports alone, which is half the time.
    for folder in src/{ucm,ucs,uct,ucp,tools/perf} test/gtest; do
        # shellcheck disable=SC2016 # for make
        make -j2 -C "$folder" BASE_CFLAGS='-w -funwind-tables' BASE_CXXFLAGS='-w -funwind-tables' CFLAGS=-O1 CXXFLAGS=-O0 \
            LIBS=-lstdc++ gtest_OBJECTS='$(filter-out ucp/% ucs/% ucm/%,$(am_gtest_OBJECTS))' || return
    done
    echo "$source"
}

programs() {
    local source transport link=eth negative
    check 'builds UCX' "^$target/ucx$" timeout 3600 bash -c "$(declare -f build); target=$target build"
    source=$target/ucx/test/gtest
    [ -x "$source/gtest" ] || return
    # Tests of UD free buffers that it may send again. A kernel pins their pages; the card needs them mapped. So they are on the heap,
    # which keeps what is freed.
    local -x UCX_UD_MLX5_ALLOC=heap UCX_UD_VERBS_ALLOC=heap MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000
    negative=$(IFS=: && echo "${exclusions[*]}")
    for transport in rc_mlx5 ud_mlx5 rc_verbs ud_verbs; do
        other_link
        UCX_NET_DEVICES=mlx5_0:1 check "$transport ($link)" '^\[  PASSED  \]' \
            card "$link" "$source/gtest" --gtest_filter="$transport/*-$negative"
    done
}
