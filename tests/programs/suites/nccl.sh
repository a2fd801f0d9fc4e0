# shellcheck shell=bash
# PyTorch's NCCL over NET/IB, two ranks on two GPUs: collectives and messages, with and without GPUDirect; failed completions

# shellcheck disable=SC2034
packages=(/etc/libibverbs.d/mlx5.driver:ibverbs-providers)

if ! python3 -c 'import sys, torch; sys.exit(not torch.distributed.is_nccl_available() or torch.cuda.device_count() < 2)' \
    2>/dev/null; then
    echo "== nccl"
    echo "skipped: needs PyTorch with NCCL, and two GPUs"
    exit 77
fi

# Between GPUs of a host NCCL takes NVLink, PCIe or shared memory by itself: a run by these would prove nothing.
export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET=IB NCCL_SOCKET_IFNAME=lo NCCL_DEBUG=INFO
export MASTER_ADDR=127.0.0.1 WORLD_SIZE=2

# ranks LINK: both ranks, under the card.
ranks() {
    local rank status=0 pids=() MASTER_PORT
    MASTER_PORT=$(free_port)
    export MASTER_PORT
    for rank in 0 1; do
        RANK=$rank card "$1" python3 "$here/suites/nccl.py" &
        pids+=($!)
    done
    for rank in 0 1; do
        wait "${pids[rank]}" || status=$?
    done
    return $status
}

# runs NAME LINK TRANSPORT VARIABLE=VALUE...
runs() {
    local name="$1 ($2)" link=$2 transport=$3
    shift 3
    (
        failed=0
        export "$@"
        check "$name" "^nccl: rank 1 of 2: all data right" ranks "$link"
        exit "$failed"
    ) || failed=$((failed + 1))
    check "$name: by this transport" "$transport" grep -E 'via NET|NET/IB' "$(log_of "$name")"
}

programs() {
    local link
    for link in eth ib; do
        runs 'host memory' $link 'via NET/IB/0$' NCCL_NET_GDR_LEVEL=LOC
        runs 'GPUDirect by address' $link 'via NET/IB/0/GDRDMA' \
            NCCL_NET_GDR_LEVEL=SYS NCCL_DMABUF_ENABLE=0 NCCL_NET_FORCE_FLUSH=1
        runs 'GPUDirect by dma-buf' $link 'via NET/IB/0/GDRDMA' NCCL_NET_GDR_LEVEL=SYS NCCL_DMABUF_ENABLE=1
    done
    # NCCL asks for 4 s of patience before a packet is sent again: here it is 1 ms.
    runs 'GPUDirect, packets lost' eth 'via NET/IB/0/GDRDMA' NCCL_NET_GDR_LEVEL=SYS NCCL_IB_TIMEOUT=8 \
        GDSYNC_FAULTS=seed=1,drop=0.01,duplicate=0.01,reorder=0.01
    check 'a completion fails' 'raised the following async exception.*network error' fails
}

# NCCL's connection ends, PyTorch's watchdog sees it, gives the ranks time for dumps, and ends the process.
fails() {
    local status=0
    GDSYNC_FAULTS=fail-send=15@40 TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=500 ranks eth || status=$?
    echo "status $status"
    # Neither success nor the end of its patience.
    ((status != 0 && status != 124 && status != 137))
}
