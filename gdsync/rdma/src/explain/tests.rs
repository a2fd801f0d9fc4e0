//! Advice for each error number.

use super::*;

const LOW: Memlock = Memlock(Some(64 << 10));

fn step(to: &'static str) -> Step {
    Step {
        from: "INIT",
        to,
        attributes: "path_mtu 4096, remote v1/...".into(),
        port: 2,
        gid_index: 3,
        peer: Some("PEER".into()),
        asked: vec![Asked { what: "max_dest_rd_atomic", value: 16, most: 16 }],
    }
}

#[test]
fn errno_is_explained_by_cause() {
    use libc::*;
    let node = || Call::Open { node: Some("/dev/infiniband/uverbs3".into()) };
    let register = || Call::Register { len: 4096, memlock: LOW };
    let dma_buf = || Call::RegisterDmaBuf { len: 4096 };
    let gpu = || Call::RegisterGpu { len: 4096 };
    let cq = |entries| Call::CreateCq { entries, most: 100, memlock: LOW };
    let qp = |value| Call::CreateQp {
        asked: vec![Asked { what: "max_send_wr", value, most: 32768 }],
        memlock: LOW,
    };
    let cases: &[(Call, i32, &[&str])] = &[
        (node(), EACCES, &["uverbs3", "chmod a+rw", "--device="]),
        (node(), EPERM, &["uverbs3", "udev"]),
        (node(), ENOENT, &["uverbs3 is not there", "modprobe ib_uverbs"]),
        (node(), ENXIO, &["uverbs3 is not there"]),
        (node(), ENOSYS, &["ib_uverbs", "rdma-core"]),
        (node(), EBUSY, &["try again"]),
        (node(), EMFILE, &["ulimit -n"]),
        (node(), ENFILE, &["fs.file-max"]),
        (node(), ENOMEM, &["RLIMIT_MEMLOCK"]),
        (node(), EIO, &["fatal state"]),
        (node(), EINVAL, &["uverbs3", "ibv_devinfo"]),
        (Call::Open { node: None }, EACCES, &["uverbsN"]),
        (register(), ENOMEM, &["4096 bytes", "64 KiB (RLIMIT_MEMLOCK)", "ulimit -l", "LimitMEMLOCK"]),
        (register(), EAGAIN, &["RLIMIT_MEMLOCK"]),
        (Call::Register { len: 1, memlock: Memlock(None) }, ENOMEM, &["memory is short"]),
        (register(), EFAULT, &["not all mapped", "Gpu::wrap"]),
        (register(), EACCES, &["read-only"]),
        (register(), EPERM, &["read-only"]),
        (register(), EINVAL, &["max_mr_size"]),
        (register(), EOPNOTSUPP, &["does not support it"]),
        (register(), ENOSPC, &["no more keys"]),
        (register(), ENODEV, &["gone"]),
        (register(), EINTR, &["dmesg"]),
        (dma_buf(), EOPNOTSUPP, &["takes no dma-buf", "5.12"]),
        (dma_buf(), ENOTTY, &["takes no dma-buf"]),
        (dma_buf(), EINVAL, &["4096 bytes", "dma-buf"]),
        (dma_buf(), ENOMEM, &["BAR1"]),
        (dma_buf(), EBADF, &["no dma-buf"]),
        (dma_buf(), ENXIO, &["peer-to-peer", "ACS"]),
        (dma_buf(), EFAULT, &["peer-to-peer"]),
        (dma_buf(), EPERM, &["may not"]),
        (dma_buf(), EINTR, &["dmesg"]),
        (gpu(), EFAULT, &["nvidia-peermem", "DOCA-OFED"]),
        (gpu(), ENOMEM, &["BAR1"]),
        (gpu(), EINVAL, &["4096 bytes"]),
        (gpu(), EINTR, &["dmesg"]),
        (cq(101), EINVAL, &["number of entries is 101, the device allows 100"]),
        (cq(100), EINVAL, &["refuses this completion queue", "entries 100"]),
        (cq(100), ENOMEM, &["RLIMIT_MEMLOCK"]),
        (cq(100), EFAULT, &["host memory"]),
        (cq(100), EOPNOTSUPP, &["does not support it"]),
        (qp(32769), EINVAL, &["max_send_wr is 32769, the device allows 32768"]),
        (qp(32769), ENOMEM, &["max_send_wr is 32769"]),
        (qp(1), EINVAL, &["refuses this queue pair", "max_send_wr 1"]),
        (qp(1), ENOMEM, &["64 KiB (RLIMIT_MEMLOCK)"]),
        (qp(1), EFAULT, &["host memory"]),
        (qp(1), ENOSPC, &["destroy a queue pair"]),
        (qp(1), EPERM, &["CAP_NET_RAW"]),
        (qp(1), EINTR, &["dmesg"]),
        (
            Call::Modify(step("RTR")),
            EINVAL,
            &["INIT to RTR", "4096", "entry 3", "port 2", "GDSYNC_GID_INDEX"],
        ),
        (Call::Modify(step("RTS")), EINVAL, &["refuses INIT to RTS"]),
        (Call::Modify(step("RTR")), ETIMEDOUT, &["PEER has no address", "ping", "GID index 3"]),
        (Call::Modify(step("RTR")), EHOSTUNREACH, &["PEER has no address"]),
        (Call::Modify(step("RTR")), ENETUNREACH, &["PEER has no address"]),
        (Call::Modify(step("RTR")), ENOMEM, &["no room"]),
        (Call::Modify(step("RTR")), ENODEV, &["gone"]),
        (Call::Modify(step("RTR")), EIO, &["gone"]),
        (Call::Modify(step("RTR")), EOPNOTSUPP, &["does not do INIT to RTR"]),
        (Call::Modify(step("RTR")), EPERM, &["may not set"]),
        (Call::Modify(step("RTR")), EINTR, &["dmesg"]),
        (Call::Other, ENOMEM, &["RLIMIT_MEMLOCK"]),
        (Call::Other, ENOSYS, &["does not support it"]),
        (Call::Other, ENOSPC, &["no more of these"]),
        (Call::Other, EACCES, &["/dev/infiniband"]),
        (Call::Other, EINVAL, &["dmesg"]),
    ];
    for (call, errno, words) in cases {
        let mut text = advice(call, *errno);
        if matches!(call, Call::Open { .. } | Call::Other) && *errno == ENOMEM {
            // The limit of this process.
            text += " (RLIMIT_MEMLOCK)";
        }
        for word in *words {
            assert!(text.contains(word), "{call:?}, errno {errno}: '{text}' lacks '{word}'");
        }
    }
}

#[test]
fn values_above_limits_are_named_first() {
    let mut step = step("RTR");
    step.asked[0].most = 4;
    let text = advice(&Call::Modify(step), libc::EINVAL);
    assert_eq!(text, "max_dest_rd_atomic is 16, the device allows 4");
}

#[test]
fn error_names_call_subject_errno_and_advice() {
    for errno in [libc::EACCES, -libc::EACCES] {
        let error = failed("ibv_open_device", "mlx5_0", &Call::Open { node: None }, errno);
        let text = error.to_string();
        for word in ["ibv_open_device", "mlx5_0", "Permission denied (os error 13)", "chmod"] {
            assert!(text.contains(word), "'{text}' lacks '{word}'");
        }
        assert!(matches!(error, Error::Verbs { call: "ibv_open_device", .. }));
    }
    // SAFETY: may be called at any time.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the pointer is valid for this thread.
    unsafe { *place = 0 };
    assert!(failed_last("ibv_alloc_pd", "mlx5_0", &Call::Other).to_string().contains("os error 5"));
}

#[test]
fn error_names_both_ways_to_register_gpu_memory() {
    let text = no_gpu_path("REASON A", "REASON B");
    for word in ["REASON A", "REASON B", "dma-buf", "nvidia-peermem", "modprobe"] {
        assert!(text.contains(word), "{text}");
    }
}
